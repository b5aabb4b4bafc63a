from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]

class ColumnType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COLUMN_TYPE_UNSPECIFIED: _ClassVar[ColumnType]
    COLUMN_TYPE_INT64: _ClassVar[ColumnType]
    COLUMN_TYPE_DOUBLE: _ClassVar[ColumnType]
    COLUMN_TYPE_STRING: _ClassVar[ColumnType]
    COLUMN_TYPE_BOOL: _ClassVar[ColumnType]

class Operator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATOR_UNSPECIFIED: _ClassVar[Operator]
    OPERATOR_EQ: _ClassVar[Operator]
    OPERATOR_NE: _ClassVar[Operator]
    OPERATOR_LT: _ClassVar[Operator]
    OPERATOR_LE: _ClassVar[Operator]
    OPERATOR_GT: _ClassVar[Operator]
    OPERATOR_GE: _ClassVar[Operator]
    OPERATOR_IN: _ClassVar[Operator]
    OPERATOR_IS_NULL: _ClassVar[Operator]

class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_UNSPECIFIED: _ClassVar[Health]
    HEALTH_SERVING: _ClassVar[Health]
    HEALTH_DAMAGED: _ClassVar[Health]

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_UNSPECIFIED: _ClassVar[Order]
    ORDER_LARGEST: _ClassVar[Order]
    ORDER_SMALLEST: _ClassVar[Order]
    ORDER_ABSOLUTE: _ClassVar[Order]

class RankBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_BY_UNSPECIFIED: _ClassVar[RankBy]
    RANK_BY_WEIGHT: _ClassVar[RankBy]
    RANK_BY_CONTRIBUTION: _ClassVar[RankBy]
    RANK_BY_COSINE: _ClassVar[RankBy]

class Strategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STRATEGY_UNSPECIFIED: _ClassVar[Strategy]
    STRATEGY_SCAN: _ClassVar[Strategy]
    STRATEGY_FLAT: _ClassVar[Strategy]
    STRATEGY_CERTIFIED: _ClassVar[Strategy]
    STRATEGY_KEY_SUMS: _ClassVar[Strategy]
    STRATEGY_DISTINCT_KEYS: _ClassVar[Strategy]
    STRATEGY_REBUILT: _ClassVar[Strategy]
    STRATEGY_PARTS: _ClassVar[Strategy]
    STRATEGY_DEVICE: _ClassVar[Strategy]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
COLUMN_TYPE_UNSPECIFIED: ColumnType
COLUMN_TYPE_INT64: ColumnType
COLUMN_TYPE_DOUBLE: ColumnType
COLUMN_TYPE_STRING: ColumnType
COLUMN_TYPE_BOOL: ColumnType
OPERATOR_UNSPECIFIED: Operator
OPERATOR_EQ: Operator
OPERATOR_NE: Operator
OPERATOR_LT: Operator
OPERATOR_LE: Operator
OPERATOR_GT: Operator
OPERATOR_GE: Operator
OPERATOR_IN: Operator
OPERATOR_IS_NULL: Operator
HEALTH_UNSPECIFIED: Health
HEALTH_SERVING: Health
HEALTH_DAMAGED: Health
ORDER_UNSPECIFIED: Order
ORDER_LARGEST: Order
ORDER_SMALLEST: Order
ORDER_ABSOLUTE: Order
RANK_BY_UNSPECIFIED: RankBy
RANK_BY_WEIGHT: RankBy
RANK_BY_CONTRIBUTION: RankBy
RANK_BY_COSINE: RankBy
STRATEGY_UNSPECIFIED: Strategy
STRATEGY_SCAN: Strategy
STRATEGY_FLAT: Strategy
STRATEGY_CERTIFIED: Strategy
STRATEGY_KEY_SUMS: Strategy
STRATEGY_DISTINCT_KEYS: Strategy
STRATEGY_REBUILT: Strategy
STRATEGY_PARTS: Strategy
STRATEGY_DEVICE: Strategy

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("int64_value", "double_value", "string_value", "bool_value")
    INT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    int64_value: int
    double_value: float
    string_value: str
    bool_value: bool
    def __init__(self, int64_value: _Optional[int] = ..., double_value: _Optional[float] = ..., string_value: _Optional[str] = ..., bool_value: bool = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "type", "data", "dictionary", "valid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DICTIONARY_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: ColumnType
    data: bytes
    dictionary: _containers.RepeatedScalarFieldContainer[str]
    valid: bytes
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[ColumnType, str]] = ..., data: _Optional[bytes] = ..., dictionary: _Optional[_Iterable[str]] = ..., valid: _Optional[bytes] = ...) -> None: ...

class ColumnInfo(_message.Message):
    __slots__ = ("name", "type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: ColumnType
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[ColumnType, str]] = ...) -> None: ...

class Comparison(_message.Message):
    __slots__ = ("column", "operator", "values")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    column: str
    operator: Operator
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, column: _Optional[str] = ..., operator: _Optional[_Union[Operator, str]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class FilterList(_message.Message):
    __slots__ = ("filters",)
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    filters: _containers.RepeatedCompositeFieldContainer[Filter]
    def __init__(self, filters: _Optional[_Iterable[_Union[Filter, _Mapping]]] = ...) -> None: ...

class Filter(_message.Message):
    __slots__ = ("comparison", "all_of", "any_of", "negated")
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    ALL_OF_FIELD_NUMBER: _ClassVar[int]
    ANY_OF_FIELD_NUMBER: _ClassVar[int]
    NEGATED_FIELD_NUMBER: _ClassVar[int]
    comparison: Comparison
    all_of: FilterList
    any_of: FilterList
    negated: Filter
    def __init__(self, comparison: _Optional[_Union[Comparison, _Mapping]] = ..., all_of: _Optional[_Union[FilterList, _Mapping]] = ..., any_of: _Optional[_Union[FilterList, _Mapping]] = ..., negated: _Optional[_Union[Filter, _Mapping]] = ...) -> None: ...

class Coverage(_message.Message):
    __slots__ = ("rows", "total", "nonfinite", "dropped", "missing")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    rows: int
    total: int
    nonfinite: int
    dropped: int
    missing: int
    def __init__(self, rows: _Optional[int] = ..., total: _Optional[int] = ..., nonfinite: _Optional[int] = ..., dropped: _Optional[int] = ..., missing: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_k", "max_queries", "max_message_bytes")
    MAX_K_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_k: int
    max_queries: int
    max_message_bytes: int
    def __init__(self, max_k: _Optional[int] = ..., max_queries: _Optional[int] = ..., max_message_bytes: _Optional[int] = ...) -> None: ...

class IndexSummary(_message.Message):
    __slots__ = ("name", "health", "health_reason", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    health: Health
    health_reason: str
    version: str
    def __init__(self, name: _Optional[str] = ..., health: _Optional[_Union[Health, str]] = ..., health_reason: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ListIndexesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListIndexesResponse(_message.Message):
    __slots__ = ("indexes", "limits")
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedCompositeFieldContainer[IndexSummary]
    limits: Limits
    def __init__(self, indexes: _Optional[_Iterable[_Union[IndexSummary, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class GetIndexRequest(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: str
    def __init__(self, index: _Optional[str] = ...) -> None: ...

class GetIndexResponse(_message.Message):
    __slots__ = ("index", "limits")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    index: IndexInfo
    limits: Limits
    def __init__(self, index: _Optional[_Union[IndexInfo, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class InexactMark(_message.Message):
    __slots__ = ("from_step", "reason")
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    reason: str
    def __init__(self, from_step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LayerInfo(_message.Message):
    __slots__ = ("name", "kind", "d_in", "d_out", "bias", "rows", "row_space", "values", "columns", "inexact", "dropped", "residences")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    D_IN_FIELD_NUMBER: _ClassVar[int]
    D_OUT_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_SPACE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    RESIDENCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    d_in: int
    d_out: int
    bias: bool
    rows: int
    row_space: int
    values: bool
    columns: _containers.RepeatedCompositeFieldContainer[ColumnInfo]
    inexact: _containers.RepeatedCompositeFieldContainer[InexactMark]
    dropped: _containers.ScalarMap[str, int]
    residences: _containers.RepeatedCompositeFieldContainer[Residence]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., d_in: _Optional[int] = ..., d_out: _Optional[int] = ..., bias: bool = ..., rows: _Optional[int] = ..., row_space: _Optional[int] = ..., values: bool = ..., columns: _Optional[_Iterable[_Union[ColumnInfo, _Mapping]]] = ..., inexact: _Optional[_Iterable[_Union[InexactMark, _Mapping]]] = ..., dropped: _Optional[_Mapping[str, int]] = ..., residences: _Optional[_Iterable[_Union[Residence, _Mapping]]] = ...) -> None: ...

class Residence(_message.Message):
    __slots__ = ("device", "rows", "key_bytes", "value_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    rows: int
    key_bytes: int
    value_bytes: int
    def __init__(self, device: _Optional[str] = ..., rows: _Optional[int] = ..., key_bytes: _Optional[int] = ..., value_bytes: _Optional[int] = ...) -> None: ...

class DeviceInfo(_message.Message):
    __slots__ = ("name", "title", "memory_bytes", "budget_bytes", "used_bytes", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    title: str
    memory_bytes: int
    budget_bytes: int
    used_bytes: int
    refused: str
    def __init__(self, name: _Optional[str] = ..., title: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("every", "sample", "seed", "zero_rows")
    EVERY_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ZERO_ROWS_FIELD_NUMBER: _ClassVar[int]
    every: int
    sample: float
    seed: int
    zero_rows: bool
    def __init__(self, every: _Optional[int] = ..., sample: _Optional[float] = ..., seed: _Optional[int] = ..., zero_rows: bool = ...) -> None: ...

class IndexInfo(_message.Message):
    __slots__ = ("name", "health", "health_reason", "steps", "optimizer", "layers", "version", "sampling", "devices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    health: Health
    health_reason: str
    steps: int
    optimizer: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerInfo]
    version: str
    sampling: Sampling
    devices: _containers.RepeatedCompositeFieldContainer[DeviceInfo]
    def __init__(self, name: _Optional[str] = ..., health: _Optional[_Union[Health, str]] = ..., health_reason: _Optional[str] = ..., steps: _Optional[int] = ..., optimizer: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerInfo, _Mapping]]] = ..., version: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceInfo, _Mapping]]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("strategy", "reason", "costs")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    strategy: Strategy
    reason: str
    costs: _containers.RepeatedCompositeFieldContainer[PlanCost]
    def __init__(self, strategy: _Optional[_Union[Strategy, str]] = ..., reason: _Optional[str] = ..., costs: _Optional[_Iterable[_Union[PlanCost, _Mapping]]] = ...) -> None: ...

class PlanCost(_message.Message):
    __slots__ = ("strategy", "seconds")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    strategy: Strategy
    seconds: float
    def __init__(self, strategy: _Optional[_Union[Strategy, str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class TopKRequest(_message.Message):
    __slots__ = ("index", "layer", "queries", "k", "where", "group_by", "order", "rank_by", "unit", "at_step", "distinct", "strategy", "explain_plan", "max_residual", "direction", "partial")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RANK_BY_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_PLAN_FIELD_NUMBER: _ClassVar[int]
    MAX_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    index: str
    layer: str
    queries: Tensor
    k: int
    where: Filter
    group_by: str
    order: Order
    rank_by: RankBy
    unit: int
    at_step: int
    distinct: str
    strategy: Strategy
    explain_plan: bool
    max_residual: float
    direction: Tensor
    partial: bool
    def __init__(self, index: _Optional[str] = ..., layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ..., k: _Optional[int] = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., group_by: _Optional[str] = ..., order: _Optional[_Union[Order, str]] = ..., rank_by: _Optional[_Union[RankBy, str]] = ..., unit: _Optional[int] = ..., at_step: _Optional[int] = ..., distinct: _Optional[str] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., explain_plan: bool = ..., max_residual: _Optional[float] = ..., direction: _Optional[_Union[Tensor, _Mapping]] = ..., partial: bool = ...) -> None: ...

class TopKResponse(_message.Message):
    __slots__ = ("rows", "scores", "columns", "groups", "coverage", "counts", "plan", "index_version")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    rows: Tensor
    scores: Tensor
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    groups: Column
    coverage: Coverage
    counts: Tensor
    plan: Plan
    index_version: str
    def __init__(self, rows: _Optional[_Union[Tensor, _Mapping]] = ..., scores: _Optional[_Union[Tensor, _Mapping]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., groups: _Optional[_Union[Column, _Mapping]] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., counts: _Optional[_Union[Tensor, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., index_version: _Optional[str] = ...) -> None: ...

class TopGroupsRequest(_message.Message):
    __slots__ = ("index", "layer", "queries", "by", "k", "where", "order", "rank_by", "unit", "at_step", "max_residual", "direction", "strategy", "explain_plan", "partial")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RANK_BY_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_PLAN_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    index: str
    layer: str
    queries: Tensor
    by: str
    k: int
    where: Filter
    order: Order
    rank_by: RankBy
    unit: int
    at_step: int
    max_residual: float
    direction: Tensor
    strategy: Strategy
    explain_plan: bool
    partial: bool
    def __init__(self, index: _Optional[str] = ..., layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ..., by: _Optional[str] = ..., k: _Optional[int] = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., order: _Optional[_Union[Order, str]] = ..., rank_by: _Optional[_Union[RankBy, str]] = ..., unit: _Optional[int] = ..., at_step: _Optional[int] = ..., max_residual: _Optional[float] = ..., direction: _Optional[_Union[Tensor, _Mapping]] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., explain_plan: bool = ..., partial: bool = ...) -> None: ...

class TopGroupsResponse(_message.Message):
    __slots__ = ("groups", "scores", "counts", "coverage", "plan", "index_version")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    groups: Column
    scores: Tensor
    counts: Tensor
    coverage: Coverage
    plan: Plan
    index_version: str
    def __init__(self, groups: _Optional[_Union[Column, _Mapping]] = ..., scores: _Optional[_Union[Tensor, _Mapping]] = ..., counts: _Optional[_Union[Tensor, _Mapping]] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., index_version: _Optional[str] = ...) -> None: ...

class AttributedLayer(_message.Message):
    __slots__ = ("layer", "queries", "direction", "inputs")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    layer: str
    queries: Tensor
    direction: Tensor
    inputs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ..., direction: _Optional[_Union[Tensor, _Mapping]] = ..., inputs: _Optional[_Iterable[int]] = ...) -> None: ...

class AttributeRequest(_message.Message):
    __slots__ = ("index", "layers", "inputs", "by", "k", "where", "order", "max_residual")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MAX_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    index: str
    layers: _containers.RepeatedCompositeFieldContainer[AttributedLayer]
    inputs: int
    by: str
    k: int
    where: Filter
    order: Order
    max_residual: float
    def __init__(self, index: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[AttributedLayer, _Mapping]]] = ..., inputs: _Optional[int] = ..., by: _Optional[str] = ..., k: _Optional[int] = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., order: _Optional[_Union[Order, str]] = ..., max_residual: _Optional[float] = ...) -> None: ...

class AttributeResponse(_message.Message):
    __slots__ = ("groups", "scores", "counts", "by_layer", "initial", "rows", "residual", "outputs", "coverage", "index_version")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BY_LAYER_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    groups: Column
    scores: Tensor
    counts: Tensor
    by_layer: Tensor
    initial: Tensor
    rows: Tensor
    residual: Tensor
    outputs: Tensor
    coverage: _containers.RepeatedCompositeFieldContainer[Coverage]
    index_version: str
    def __init__(self, groups: _Optional[_Union[Column, _Mapping]] = ..., scores: _Optional[_Union[Tensor, _Mapping]] = ..., counts: _Optional[_Union[Tensor, _Mapping]] = ..., by_layer: _Optional[_Union[Tensor, _Mapping]] = ..., initial: _Optional[_Union[Tensor, _Mapping]] = ..., rows: _Optional[_Union[Tensor, _Mapping]] = ..., residual: _Optional[_Union[Tensor, _Mapping]] = ..., outputs: _Optional[_Union[Tensor, _Mapping]] = ..., coverage: _Optional[_Iterable[_Union[Coverage, _Mapping]]] = ..., index_version: _Optional[str] = ...) -> None: ...

class SelfInfluenceRequest(_message.Message):
    __slots__ = ("index", "layer", "by", "where", "first", "count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    index: str
    layer: str
    by: str
    where: Filter
    first: int
    count: int
    def __init__(self, index: _Optional[str] = ..., layer: _Optional[str] = ..., by: _Optional[str] = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SelfInfluenceResponse(_message.Message):
    __slots__ = ("groups", "scores", "counts", "total", "coverage", "index_version")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    groups: Column
    scores: Tensor
    counts: Tensor
    total: int
    coverage: Coverage
    index_version: str
    def __init__(self, groups: _Optional[_Union[Column, _Mapping]] = ..., scores: _Optional[_Union[Tensor, _Mapping]] = ..., counts: _Optional[_Union[Tensor, _Mapping]] = ..., total: _Optional[int] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., index_version: _Optional[str] = ...) -> None: ...

class SumsRequest(_message.Message):
    __slots__ = ("index", "layer", "queries", "group_by", "absolute", "where", "bins", "strategy", "explain_plan", "partial")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    ABSOLUTE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    BINS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_PLAN_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    index: str
    layer: str
    queries: Tensor
    group_by: str
    absolute: bool
    where: Filter
    bins: _containers.RepeatedScalarFieldContainer[float]
    strategy: Strategy
    explain_plan: bool
    partial: bool
    def __init__(self, index: _Optional[str] = ..., layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ..., group_by: _Optional[str] = ..., absolute: bool = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., bins: _Optional[_Iterable[float]] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., explain_plan: bool = ..., partial: bool = ...) -> None: ...

class SumsResponse(_message.Message):
    __slots__ = ("groups", "values", "counts", "coverage", "plan", "index_version")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    groups: Column
    values: Tensor
    counts: Tensor
    coverage: Coverage
    plan: Plan
    index_version: str
    def __init__(self, groups: _Optional[_Union[Column, _Mapping]] = ..., values: _Optional[_Union[Tensor, _Mapping]] = ..., counts: _Optional[_Union[Tensor, _Mapping]] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., index_version: _Optional[str] = ...) -> None: ...

class DualOutputRequest(_message.Message):
    __slots__ = ("index", "layer", "queries", "where", "at_step", "group_by", "strategy", "explain_plan", "max_residual")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_PLAN_FIELD_NUMBER: _ClassVar[int]
    MAX_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    index: str
    layer: str
    queries: Tensor
    where: Filter
    at_step: int
    group_by: str
    strategy: Strategy
    explain_plan: bool
    max_residual: float
    def __init__(self, index: _Optional[str] = ..., layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., at_step: _Optional[int] = ..., group_by: _Optional[str] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., explain_plan: bool = ..., max_residual: _Optional[float] = ...) -> None: ...

class DualOutputResponse(_message.Message):
    __slots__ = ("values", "initial", "trained", "groups", "counts", "coverage", "residual", "plan", "index_version")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    values: Tensor
    initial: Tensor
    trained: Tensor
    groups: Column
    counts: Tensor
    coverage: Coverage
    residual: Tensor
    plan: Plan
    index_version: str
    def __init__(self, values: _Optional[_Union[Tensor, _Mapping]] = ..., initial: _Optional[_Union[Tensor, _Mapping]] = ..., trained: _Optional[_Union[Tensor, _Mapping]] = ..., groups: _Optional[_Union[Column, _Mapping]] = ..., counts: _Optional[_Union[Tensor, _Mapping]] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., residual: _Optional[_Union[Tensor, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., index_version: _Optional[str] = ...) -> None: ...

class ExplainLayer(_message.Message):
    __slots__ = ("layer", "queries")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    layer: str
    queries: Tensor
    def __init__(self, layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("index", "layers", "where", "k", "order", "group_by", "absolute", "output", "max_residual")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    ABSOLUTE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MAX_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    index: str
    layers: _containers.RepeatedCompositeFieldContainer[ExplainLayer]
    where: Filter
    k: int
    order: Order
    group_by: str
    absolute: bool
    output: bool
    max_residual: float
    def __init__(self, index: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[ExplainLayer, _Mapping]]] = ..., where: _Optional[_Union[Filter, _Mapping]] = ..., k: _Optional[int] = ..., order: _Optional[_Union[Order, str]] = ..., group_by: _Optional[str] = ..., absolute: bool = ..., output: bool = ..., max_residual: _Optional[float] = ...) -> None: ...

class ExplainedLayer(_message.Message):
    __slots__ = ("layer", "top_k", "sums", "output")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    layer: str
    top_k: TopKResponse
    sums: SumsResponse
    output: DualOutputResponse
    def __init__(self, layer: _Optional[str] = ..., top_k: _Optional[_Union[TopKResponse, _Mapping]] = ..., sums: _Optional[_Union[SumsResponse, _Mapping]] = ..., output: _Optional[_Union[DualOutputResponse, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("layers", "index_version")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[ExplainedLayer]
    index_version: str
    def __init__(self, layers: _Optional[_Iterable[_Union[ExplainedLayer, _Mapping]]] = ..., index_version: _Optional[str] = ...) -> None: ...

class StreamWeightsRequest(_message.Message):
    __slots__ = ("index", "layer", "queries")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    index: str
    layer: str
    queries: Tensor
    def __init__(self, index: _Optional[str] = ..., layer: _Optional[str] = ..., queries: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class StreamWeightsResponse(_message.Message):
    __slots__ = ("start", "weights", "index_version")
    START_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    weights: Tensor
    index_version: str
    def __init__(self, start: _Optional[int] = ..., weights: _Optional[_Union[Tensor, _Mapping]] = ..., index_version: _Optional[str] = ...) -> None: ...

class GetExamplesRequest(_message.Message):
    __slots__ = ("index", "ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    index: str
    ids: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, index: _Optional[str] = ..., ids: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Example(_message.Message):
    __slots__ = ("id", "data", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: Value
    data: bytes
    text: str
    def __init__(self, id: _Optional[_Union[Value, _Mapping]] = ..., data: _Optional[bytes] = ..., text: _Optional[str] = ...) -> None: ...

class GetExamplesResponse(_message.Message):
    __slots__ = ("examples", "index_version")
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    examples: _containers.RepeatedCompositeFieldContainer[Example]
    index_version: str
    def __init__(self, examples: _Optional[_Iterable[_Union[Example, _Mapping]]] = ..., index_version: _Optional[str] = ...) -> None: ...
