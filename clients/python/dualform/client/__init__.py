"""The SDK: ask a dualform server, or an index on disk, which training rows made an output.

Remote mode needs grpcio, protobuf and numpy only. What is behind the names:

    Client, AsyncClient      the questions; `Client.local(path)` asks an index without a server
    capture_queries          a model's inputs to its linear layers, as queries
    dual_form                a model's forward pass with layers in dual form
    parse_filter, Filter     filters as text and as messages
    Retry                    when to try again
    DualformError            base of all errors, see `dualform.client.errors`
"""

from dualform.client._async import AsyncClient
from dualform.client._attribution import AttributionResult
from dualform.client._capture import capture_queries
from dualform.client._dual_form import dual_form
from dualform.client._filters import parse_filter
from dualform.client._info import (
    DeviceInfo,
    IndexInfo,
    IndexSummary,
    InexactMark,
    LayerInfo,
    Residence,
    Sampling,
    ServerLimits,
)
from dualform.client._results import (
    ChosenPlan,
    Coverage,
    DualOutputResult,
    Explanation,
    SumsResult,
    TopGroupsResult,
    TopKResult,
    WeightsChunk,
)
from dualform.client._retry import Retry
from dualform.client._scores import ScoresResult
from dualform.client._self_influence import SelfInfluenceResult
from dualform.client._sync import Client
from dualform.client._text import Span, TextAttribution
from dualform.client.errors import (
    CallError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    DualformError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownColumnError,
)
from dualform.v1.attribution_pb2 import Filter

__all__ = [
    "AsyncClient",
    "AttributionResult",
    "CallError",
    "CancelledError",
    "ChosenPlan",
    "Client",
    "Coverage",
    "DataLossError",
    "DeadlineExceededError",
    "DeviceInfo",
    "DualOutputResult",
    "DualformError",
    "Explanation",
    "FailedPreconditionError",
    "Filter",
    "IndexInfo",
    "IndexSummary",
    "InexactMark",
    "InternalError",
    "InvalidArgumentError",
    "LayerInfo",
    "NotFoundError",
    "PermissionDeniedError",
    "Residence",
    "ResourceExhaustedError",
    "Retry",
    "Sampling",
    "ScoresResult",
    "SelfInfluenceResult",
    "ServerLimits",
    "Span",
    "SumsResult",
    "TextAttribution",
    "TopGroupsResult",
    "TopKResult",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownColumnError",
    "WeightsChunk",
    "capture_queries",
    "dual_form",
    "parse_filter",
]
