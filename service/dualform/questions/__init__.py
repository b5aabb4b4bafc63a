"""The questions that can be asked, one class each: named fields, defaults and checks in one place.

The remote client, the engine and a local index use the same objects; `message_of` and `question_of`
go between them and the wire. Needs NumPy and protobuf alone.
"""

from dualform.questions.attributed import AttributedLayer
from dualform.questions.errors import QuestionError
from dualform.questions.question import Question
from dualform.questions.questions import (
    MAX_RESIDUAL,
    AttributeQuestion,
    ExamplesQuestion,
    ExplainQuestion,
    IndexesQuestion,
    IndexQuestion,
    OutputQuestion,
    RowsQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.questions.wire import message_of, question_of, tensor_of

__all__ = [
    "MAX_RESIDUAL",
    "AttributeQuestion",
    "AttributedLayer",
    "ExamplesQuestion",
    "ExplainQuestion",
    "IndexQuestion",
    "IndexesQuestion",
    "OutputQuestion",
    "Question",
    "QuestionError",
    "RowsQuestion",
    "SelfInfluenceQuestion",
    "StreamWeightsQuestion",
    "SumsQuestion",
    "TopGroupsQuestion",
    "TopKQuestion",
    "message_of",
    "question_of",
    "tensor_of",
]
