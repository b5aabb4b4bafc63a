from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OPENED: _ClassVar[Outcome]
    OUTCOME_KEPT: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_REMOVED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OPENED: Outcome
OUTCOME_KEPT: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_REMOVED: Outcome

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("what", "outcome", "version", "detail")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    what: str
    outcome: Outcome
    version: str
    detail: str
    def __init__(self, what: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., version: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
