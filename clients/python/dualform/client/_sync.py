"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dualform.client._answers import dual_output_of, sums_of, top_groups_of, top_k_of
from dualform.client._arrays import direction_matrix, query_matrices, query_matrix
from dualform.client._asking import Asking
from dualform.client._attributing import Attributing
from dualform.client._attribution import AttributionResult
from dualform.client._calls import checked_calls
from dualform.client._connection import Tls, connection_of
from dualform.client._driving import Driver
from dualform.client._filters import filter_of
from dualform.client._info import IndexInfo, IndexSummary
from dualform.client._local import LocalTransport
from dualform.client._results import (
    DualOutputResult,
    Explanation,
    SumsResult,
    TopGroupsResult,
    TopKResult,
    WeightsChunk,
)
from dualform.client._retry import DEFAULT_RETRY, Retry
from dualform.client._scores import ScoresResult, path_of
from dualform.client._self_influence import SelfInfluenceResult, self_influence
from dualform.client._targets import Target
from dualform.client._text import TextAttribution, TextQuestion
from dualform.client._tokens import Tokenizer
from dualform.client._transport import GrpcTransport
from dualform.questions import (
    ExplainQuestion,
    IndexQuestion,
    OutputQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.questions.placement import GPU_MEMORY
from dualform.questions.questions import (
    Order,
    OutputStrategy,
    RankBy,
    SumsStrategy,
    TopKStrategy,
)
from dualform.v1.attribution_pb2 import Filter

if TYPE_CHECKING:
    import torch


@checked_calls
class Client(Driver):
    """Asks a server, or with `Client.local` an index on disk.

    Safe to use from several threads, and in processes forked after it was made: a forked process
    opens a connection of its own. What a local index needs there: `Client.local`.

    Every question takes `index=` (needed only where several are served) and `timeout=`: seconds
    for the whole call, retries and parts of a large batch included; None means the client's own,
    `math.inf` no limit.

    Args:
        server: "HOST:PORT".
        tls: True encrypts and trusts the authorities that gRPC does; the path of a file of
            certificates (PEM) trusts those in it instead.
        certificate: This client's own (a PEM file), where the server asks for one; needs `key`.
        key: The key of `certificate` (a PEM file).
        token: What the server knows the caller by; None takes DUALFORM_TOKEN from the environment,
            "" sends none. Beyond this machine only with `tls`.
        retry: When to try again; None turns retries off.
        timeout: Seconds per call unless the call says otherwise; None for no limit.

    Raises:
        InvalidArgumentError: `server` is no address; files of `tls`, `certificate` or `key` that
            can't be read; a token that would travel in the clear.

    Example:
        >>> with Client("localhost:50051") as client:
        ...     hits = client.top_k("0", queries, k=10, where="label = 6")
    """

    def __init__(
        self,
        server: str,
        *,
        tls: Tls = False,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        token: str | None = None,
        retry: Retry | None = DEFAULT_RETRY,
        timeout: float | None = 60.0,
    ) -> None:
        connection = connection_of(server, tls, certificate, key, token)
        self._start(GrpcTransport(connection), Asking(retry, timeout))

    @classmethod
    def local(
        cls,
        path: str | Path,
        *,
        device: str | Sequence[str] = "auto",
        gpu_memory: float | str = GPU_MEMORY,
        timeout: float | None = None,
    ) -> Client:
        """A client on an index on disk: same methods, no server.

        Args:
            path: The index's directory.
            device: "auto" (all GPUs that there are, or the CPU alone), "cpu", "cuda", "cuda:1", or
                a list of GPUs.
            gpu_memory: How much of each GPU's memory may be taken: a share, or text such as
                "20GiB".
            timeout: As for the class; no limit by default.

        Raises:
            NotFoundError: No such directory.
            FailedPreconditionError: The engine's dependencies are not installed.
        """
        client = cls.__new__(cls)
        client._start(LocalTransport(path, device, gpu_memory), Asking(None, timeout, local=True))
        return client

    def indexes(self, *, timeout: float | None = None) -> list[IndexSummary]:
        """What is served, with each index's health."""
        return self._run(self._asking.indexes(timeout))

    def index(self, name: str | None = None, *, timeout: float | None = None) -> IndexInfo:
        """One index: its layers with sizes, rows, columns and exactness.

        Args:
            name: None where one index is served.
            timeout: Seconds.

        Raises:
            NotFoundError: No such index.
        """
        return self._run(self._asking.index(IndexQuestion(index=name), timeout))

    def top_k(
        self,
        layer: str,
        queries: object,
        *,
        k: int = 10,
        where: str | Filter | None = None,
        group_by: str | None = None,
        order: Order = "largest",
        rank_by: RankBy = "weight",
        unit: int | None = None,
        direction: object = None,
        at_step: int | None = None,
        distinct: str | None = None,
        max_residual: float | None = None,
        strategy: TopKStrategy = "auto",
        explain_plan: bool = False,
        partial: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> TopKResult:
        """The k rows with the largest attention weight, cosine or contribution per query.

        The weight of a row is x_t.x, its contribution to output unit u
        (c_t x_t.x + c'_t) e_t[u], primes for the bias (paper, eq. dual_linear). Over all rows
        contributions add up, with `initial`, to the dual output at the same step. Along a direction
        g it is (c_t x_t.x + c'_t) (e_t.g): with the gradient of a logit, margin or loss at the
        layer's output for g, what the row did to that number, to first order.

        Args:
            layer: As in `model.named_modules()`.
            queries: float32 [n, d_in]: numpy, torch on any device, or what `np.asarray` takes.
            k: Rows per query, and per group.
            where: Which rows take part: text such as "label = 6 and step < 3000", or a Filter.
            group_by: A metadata column: the k best rows of each of its values.
            order: "largest", "smallest", or "absolute" (by |score|, scores stay signed).
            rank_by: "weight"; "cosine": scores are then x_t.x / (|x_t| |x|), and 0 where either is
                zero; or "contribution": contributions to `unit`, or along `direction`; one of the
                two is needed.
            unit: The output unit, 0 to d_out - 1; with "contribution" only.
            direction: float32 [n, d_out], one for each query, as `queries` are given; likewise.
            at_step: Contributions to the layer after so many steps, of the rows before; None for
                the trained layer. With "contribution" only.
            distinct: A metadata column: of rows with the same value only the best counts, and
                `counts` says how many took part. Rows without a value stand for themselves.
            max_residual: Contributions to the trained layer: as for `dual_output`.
            strategy: "auto", or "certified", "device", "distinct_keys", "flat" or "scan": how rows
                are found. The answer is the same; one that does not apply is refused.
            explain_plan: Say in `plan` which strategy was chosen, and why.
            partial: Where the index is on several machines, answer without the rows of those that
                are out of reach; `coverage.missing` says how many. Refused otherwise.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            Rows int64 and scores float32 [n, k], or [n, groups, k]; ties by row id.

        Raises:
            InvalidArgumentError: Wrong shape, dtype, k, order, filter, column, unit, direction or
                step; see `field`.
            NotFoundError: No such layer or index.
            FailedPreconditionError: Contributions of an index without values; or as for
                `dual_output`.
            ResourceExhaustedError: k over the server's limit, or its queue is full; a direction
                that would take too long, which can be where rows have no coefficients.
        """
        question = TopKQuestion(
            layer=layer,
            queries=query_matrix(queries),
            k=k,
            where=filter_of(where),
            group_by=group_by,
            order=order,
            rank_by=rank_by,
            unit=unit,
            direction=direction_matrix(direction),
            at_step=at_step,
            distinct=distinct,
            max_residual=max_residual,
            strategy=strategy,
            explain_plan=explain_plan,
            partial=partial,
            index=index,
        )
        return self._run(self._asking.rows(question, where, timeout, top_k_of))

    def top_groups(
        self,
        layer: str,
        queries: object,
        *,
        by: str,
        k: int = 10,
        where: str | Filter | None = None,
        order: Order = "largest",
        rank_by: RankBy = "weight",
        unit: int | None = None,
        direction: object = None,
        at_step: int | None = None,
        max_residual: float | None = None,
        strategy: SumsStrategy = "auto",
        explain_plan: bool = False,
        partial: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> TopGroupsResult:
        """The k groups whose rows' weights, cosines or contributions add up to most per query.

        With `by="example"` the training examples behind an output, where `top_k` gives their rows:
        an example has one in every epoch. Rows without a value are a group too, None.

        Args:
            layer: As in `model.named_modules()`.
            queries: As for `top_k`.
            by: The metadata column whose values are the groups.
            k: Groups per query; of any number, the others are not sent.
            where: Which rows are added up, as for `top_k`.
            order: By sum: "largest", "smallest", or "absolute" (by |sum|, sums stay signed).
            rank_by: What is added up: "weight", "cosine" (each row counts by its direction alone:
                divided by `counts`, a group's mean cosine) or "contribution" (see `top_k`) to
                `unit`, or along `direction`; one of the two is needed.
            unit: As for `top_k`.
            direction: As for `top_k`.
            at_step: As for `top_k`.
            max_residual: As for `top_k`.
            strategy: "auto", or by weight "key_sums", "distinct_keys", "device" or "scan", as for
                `sums`.
            explain_plan: As for `top_k`.
            partial: As for `top_k`.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            Groups and their sums, float64 [n, k], with the rows of each; of equal sums the lower
            group comes first, None last.

        Raises:
            InvalidArgumentError: As for `top_k`; a column in which no row has a value.
            NotFoundError, FailedPreconditionError, ResourceExhaustedError: As for `top_k`.
        """
        question = TopGroupsQuestion(
            layer=layer,
            queries=query_matrix(queries),
            by=by,
            k=k,
            where=filter_of(where),
            order=order,
            rank_by=rank_by,
            unit=unit,
            direction=direction_matrix(direction),
            at_step=at_step,
            max_residual=max_residual,
            strategy=strategy,
            explain_plan=explain_plan,
            partial=partial,
            index=index,
        )
        return self._run(self._asking.rows(question, where, timeout, top_groups_of))

    def attribute(
        self,
        model: torch.nn.Module,
        inputs: Any,
        *,
        target: Target = "margin",
        labels: object = None,
        token: object = None,
        together: bool = False,
        by: str = "example",
        k: int = 10,
        layers: str | Sequence[str] | None = None,
        order: Order = "largest",
        where: str | Filter | None = None,
        max_residual: float | None = None,
        check_model: bool = True,
        index: str | None = None,
        timeout: float | None = None,
    ) -> AttributionResult:
        """The k training examples, or other groups, that did most to what a model says of inputs.

        The model runs once, and back: what each layer sees, and the gradient g of the target at
        the layer's output. A row's part is (c_t x_t.x + c'_t) (e_t.g), what it added to that
        output along g; where a layer sees several places of an input, as of a sequence or an image,
        they are added up, and so are the rows of an example and the layers. At the last layer that
        is exact; through the layers before it is what the row did to the target to first order.

        Args:
            model: The trained model, as it was recorded, not compiled. It runs in eval mode, and is
                afterwards as it was.
            inputs: What its forward takes: one argument; a tuple of several; or a mapping of named
                ones, as tokenizers give.
            target: The number of each input that is attributed: a class (one, or one for each
                input: its logit); "margin", the predicted class's logit less the logsumexp of the
                others; "loss", the cross-entropy with `labels`; or a function of what the model
                gives, to a tensor [n].
            labels: The classes of "loss"; of "margin" where not the predicted class is meant.
            token: Of logits [n, tokens, classes], the place that is meant: one, or one for each
                input; -1 is the last. "loss" without it adds up all tokens, those labelled -100
                left out.
            together: Attribute the sum of all inputs' targets, which is then the only input of the
                answer: with "loss" of a validation set what harmed it, or helped ("smallest").
            by: The metadata column whose values are the groups.
            k: Groups per input.
            layers: Names or glob patterns of the index's layers; None takes all that the model has.
            order: By score: "largest" (what raised the target most), "smallest" (lowered),
                "absolute".
            where: Which rows are added up, as for `top_k`.
            max_residual: As for `dual_output`, of every layer.
            check_model: Refuse a model whose layers are not, up to rounding, what the index was
                trained to.
            index: Its name; None where one is served.
            timeout: Seconds, the model's own included.

        Returns:
            Groups and scores, float64 [n, k], of equal ones the lower group first; the scores by
            layer, and what is there beside rows.

        Raises:
            InvalidArgumentError: A target, labels, token or column that does not fit; inputs that
                have an influence on one another; what is not finite.
            FailedPreconditionError: Another model than the one recorded; layers that do not run;
                or as for `dual_output`.
            NotFoundError, ResourceExhaustedError: As for `top_k`.

        Example:
            >>> found = client.attribute(model, images, target="margin", k=10)
            >>> found.groups[0], found.scores[0]
        """
        asked = {
            "by": by,
            "k": k,
            "where": filter_of(where),
            "order": order,
            "max_residual": max_residual,
            "index": index,
        }
        question = Attributing(
            model, inputs, target, labels, token, together, layers, check_model, asked, where
        )
        return self._run(question.attribute(self._asking, timeout))

    def scores(
        self,
        model: torch.nn.Module,
        inputs: Any,
        *,
        target: Target = "margin",
        labels: object = None,
        token: object = None,
        together: bool = False,
        by: str = "example",
        layers: str | Sequence[str] | None = None,
        where: str | Filter | None = None,
        max_residual: float | None = None,
        check_model: bool = True,
        out: str | Path | None = None,
        index: str | None = None,
        timeout: float | None = None,
    ) -> ScoresResult:
        """What every training example, or other group, did to what a model says of inputs.

        The scores of `attribute`, of all groups.

        Args:
            model: As for `attribute`, likewise all arguments that are not told here.
            inputs: Of any number: the answer comes in as many parts as the server's limits need.
            target: As for `attribute`.
            labels: As for `attribute`.
            token: As for `attribute`.
            together: As for `attribute`: one line for all inputs.
            by: As for `attribute`.
            layers: As for `attribute`.
            where: As for `attribute`.
            max_residual: As for `attribute`.
            check_model: As for `attribute`.
            out: A file that the parts go to as they come, so that memory holds one of them: .npy, a
                float64 array [n, groups]; or .parquet, a line for each input (`query`) and `group`
                with its `score`. None keeps all in memory.
            index: Its name; None where one is served.
            timeout: Seconds, the model's own included.

        Returns:
            float64 [n, groups], with the groups and their rows, and what is there beside rows.

        Raises:
            InvalidArgumentError, FailedPreconditionError, NotFoundError, ResourceExhaustedError: As
                for `attribute`; a file that is neither, or whose folder is not there.
        """
        asked = {
            "by": by,
            "k": None,
            "where": filter_of(where),
            "max_residual": max_residual,
            "index": index,
        }
        question = Attributing(
            model, inputs, target, labels, token, together, layers, check_model, asked, where
        )
        return self._run(question.scores(self._asking, timeout, path_of(out)))

    def attribute_text(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        prompt: str,
        completion: str,
        *,
        target: str = "margin",
        by: str = "document",
        position: str = "offset",
        k: int = 5,
        spans: int = 3,
        width: int = 8,
        layers: str | Sequence[str] | None = None,
        order: Order = "largest",
        where: str | Filter | None = None,
        max_residual: float | None = None,
        check_model: bool = True,
        index: str | None = None,
        timeout: float | None = None,
    ) -> TextAttribution:
        """The documents, and the spans in them, that made a language model say a completion.

        `attribute` of the completion's tokens after the prompt, all of them together, by document;
        then within each of the best documents by position.

        Args:
            model: A causal language model, as for `attribute`: of tokens [1, n] it gives logits
                [1, n, vocabulary], or what Hugging Face's models give.
            tokenizer: The model's: with `encode(text)` and `decode(tokens)`.
            prompt: What came before; at least one token.
            completion: What is explained; likewise. The two are tokenized apart.
            target: "margin", the log odds of the completion's tokens, added up; or "logprob".
            by: The column of the documents. Where `recorder.add_examples` kept their text under the
                same ids, spans have text.
            position: The column of the places in a document, counted in tokens from 0.
            k: Documents.
            spans: So many of each document, none overlapping; 0 for none.
            width: Places of a span.
            layers: As for `attribute`.
            order: As for `attribute`.
            where: As for `attribute`.
            max_residual: As for `attribute`.
            check_model: As for `attribute`.
            index: Its name; None where one is served.
            timeout: Seconds, the model's own included.

        Returns:
            Documents with their scores, and of each the spans with the largest sums.

        Raises:
            InvalidArgumentError: Text without tokens, a tokenizer or model of another kind, tokens
                that the model has no rows for, places that are no integers, or as for `attribute`.
            FailedPreconditionError, NotFoundError, ResourceExhaustedError: As for `attribute`.
        """
        asked = {
            "by": by,
            "k": k,
            "where": filter_of(where),
            "order": order,
            "max_residual": max_residual,
            "index": index,
        }
        question = TextQuestion(
            model, tokenizer, prompt, completion, target, position, spans, width, layers,
            check_model, asked, where,
        )  # fmt: skip
        return self._run(question.attribute(self._asking, timeout))

    def self_influence(
        self,
        *,
        by: str = "example",
        layers: str | Sequence[str] | None = None,
        where: str | Filter | None = None,
        index: str | None = None,
        timeout: float | None = None,
    ) -> SelfInfluenceResult:
        """What every training example, or other group, did to its own part of the loss.

        No model is needed, nor are the examples: the index has each one's gradient of every step
        that it was in, G at a layer's weight and g at its bias. Its part of that step's update
        lowered its part of that step's loss by s_t (|G|^2 + |g|^2) to first order, which is
        added up over the steps: TracIn's self-influence (Pruthi et al., 2020) with every step for
        a checkpoint. s_t is what the step itself multiplied a gradient by: the learning rate,
        lr (1 + momentum) with Nesterov's; what momentum and decay made of it later is not in it.
        The loss is what training computed: of a mean over a batch each example has its share, and
        where a GradScaler multiplied it, it is the multiplied one. What few others teach, such as a
        wrong label, comes out large.

        Args:
            by: The metadata column whose values are the groups; rows without one take no part.
            layers: Names or glob patterns of the index's layers; None takes all with values.
            where: Which rows take part, as for `top_k`.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            Float64 [groups], in the order of the groups, with each layer's share.

        Raises:
            InvalidArgumentError: A filter, layer or column that is not there; a column in which no
                row has a value.
            FailedPreconditionError: An index without values, or not exact; an optimizer outside
                SGD's family; an index on several machines.
            NotFoundError: No such index.
        """
        asked = SelfInfluenceQuestion("", by=by, where=filter_of(where), index=index)
        return self._run(self_influence(self._asking, asked, layers, where, timeout))

    def sums(
        self,
        layer: str,
        queries: object,
        *,
        group_by: str,
        absolute: bool = False,
        where: str | Filter | None = None,
        bins: Iterable[float] | None = None,
        strategy: SumsStrategy = "auto",
        explain_plan: bool = False,
        partial: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> SumsResult:
        """Total attention weight per group: signed, or of absolute values.

        Args:
            layer: As in `model.named_modules()`.
            queries: As for `top_k`.
            group_by: The metadata column to sum over.
            absolute: Sum |a_t| instead of a_t.
            where: As for `top_k`.
            bins: Ascending edges for a numeric column, as in `numpy.histogram`: group i holds
                bins[i] <= value < bins[i + 1], the last one its upper edge too. Other rows take no
                part; groups are called by their lower edges.
            strategy: "auto", "key_sums", "distinct_keys", "device" or "scan"; as for `top_k`.
            explain_plan: As for `top_k`.
            partial: As for `top_k`.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            float64 [n, groups], with the rows per group.

        Raises:
            InvalidArgumentError, NotFoundError, ResourceExhaustedError: As for `top_k`.
        """
        question = SumsQuestion(
            layer=layer,
            queries=query_matrix(queries),
            group_by=group_by,
            absolute=absolute,
            where=filter_of(where),
            bins=bins,  # type: ignore[arg-type]
            strategy=strategy,
            explain_plan=explain_plan,
            partial=partial,
            index=index,
        )
        return self._run(self._asking.rows(question, where, timeout, sums_of))

    def profile(
        self,
        layer: str,
        queries: object,
        *,
        bins: int = 50,
        absolute: bool = False,
        where: str | Filter | None = None,
        index: str | None = None,
        timeout: float | None = None,
    ) -> SumsResult:
        """Total attention weight over training: sums over equal parts of its steps.

        Args:
            layer: As in `model.named_modules()`.
            queries: As for `top_k`.
            bins: Number of parts.
            absolute: Sum |a_t| instead of a_t.
            where: As for `top_k`.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            float64 [n, bins]; groups are the steps at which the parts start, as floats.

        Raises:
            InvalidArgumentError, NotFoundError, ResourceExhaustedError: As for `top_k`.
        """
        question = SumsQuestion(
            layer=layer,
            queries=query_matrix(queries),
            group_by="step",
            absolute=absolute,
            where=filter_of(where),
            index=index,
        )
        return self._run(self._asking.profile(question, bins, where, timeout))

    def dual_output(
        self,
        layer: str,
        queries: object,
        *,
        where: str | Filter | None = None,
        at_step: int | None = None,
        group_by: str | None = None,
        max_residual: float | None = None,
        strategy: OutputStrategy = "auto",
        explain_plan: bool = False,
        index: str | None = None,
        timeout: float | None = None,
    ) -> DualOutputResult:
        """The layer's output as initial part plus the rows' contributions.

        Args:
            layer: As in `model.named_modules()`.
            queries: As for `top_k`.
            where: Which rows contribute; the initial part always stays.
            at_step: The layer after so many steps; None for the trained layer. Not the same as
                the filter "step < s", which keeps the trained layer's coefficients.
            group_by: A metadata column: each group's part alone.
            max_residual: The largest part of an output, by Euclidean length, that no row may
                explain (rounding, reduced precision, edits by hand) for an answer to be given;
                None for 1e-4. It is `residual` in the answer.
            strategy: "auto", "rebuilt", "parts", "device" or "scan"; as for `top_k`.
            explain_plan: As for `top_k`.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            float32 [n, d_out] with the initial part included, or [n, groups, d_out] without.

        Raises:
            InvalidArgumentError, NotFoundError, ResourceExhaustedError: As for `top_k`.
            FailedPreconditionError: The index holds no values; what no row explains is more than
                `max_residual`; or nobody knows how much that is.
        """
        question = OutputQuestion(
            layer=layer,
            queries=query_matrix(queries),
            where=filter_of(where),
            at_step=at_step,
            group_by=group_by,
            max_residual=max_residual,
            strategy=strategy,
            explain_plan=explain_plan,
            index=index,
        )
        return self._run(self._asking.rows(question, where, timeout, dual_output_of))

    def explain(
        self,
        queries: Mapping[str, object],
        *,
        k: int | None = 10,
        order: Order = "largest",
        where: str | Filter | None = None,
        group_by: str | None = None,
        absolute: bool = False,
        output: bool = False,
        max_residual: float | None = None,
        index: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Explanation]:
        """Several answers for several layers; sums and output share a scan where both need one.

        Args:
            queries: float32 [n, d_in] by layer, such as `capture_queries` gives.
            k: The best rows by weight, as `top_k` gives; None for none.
            order: As for `top_k`.
            where: Which rows take part, in all answers.
            group_by: A metadata column: `sums` over it, and the output split by it; None for no
                sums, and the output whole.
            absolute: Sum |a_t| instead of a_t.
            output: The dual output too.
            max_residual: With output: as for `dual_output`.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            By layer, in the order given: `top_k`, `sums` and `output`, None for what was not asked.

        Raises:
            InvalidArgumentError, NotFoundError, ResourceExhaustedError: As for `top_k`.
            FailedPreconditionError: As for `dual_output`.
        """
        question = ExplainQuestion(
            layers=query_matrices(queries),
            k=k,
            order=order,
            where=filter_of(where),
            group_by=group_by,
            absolute=absolute,
            output=output,
            max_residual=max_residual,
            index=index,
        )
        return self._run(self._asking.explain(question, where, timeout))

    def stream_weights(
        self,
        layer: str,
        queries: object,
        *,
        index: str | None = None,
        timeout: float | None = None,
    ) -> Iterator[WeightsChunk]:
        """Every attention weight in row order, in chunks that come as they are taken.

        Args:
            layer: As in `model.named_modules()`.
            queries: As for `top_k`, as many as one request may hold.
            index: Its name; None where one is served.
            timeout: Seconds for the whole stream, the time between chunks included.

        Returns:
            An iterator of chunks with `start`, the first row's id, and `weights`, float32 [n, m]:
            the weights of rows start to start + m - 1. Closing it, or leaving a loop over it, gives
            the rest up. The weights of a key that is not finite are not finite either.

        Raises:
            InvalidArgumentError, NotFoundError, ResourceExhaustedError: As for `top_k`; while the
                chunks are taken.
        """
        question = StreamWeightsQuestion(layer, query_matrix(queries), index=index)
        return self._stream(self._asking.stream_weights(question, timeout))

    def examples(
        self, ids: Iterable[object], *, index: str | None = None, timeout: float | None = None
    ) -> list[bytes | str | None]:
        """Payloads kept with the recording: PNG bytes or text.

        Args:
            ids: One-dimensional: ints or strings, such as `hits["example"][0]`; None (padding) is
                answered with None.
            index: Its name; None where one is served.
            timeout: Seconds.

        Returns:
            In the order of `ids`; None for an id without a payload.

        Raises:
            InvalidArgumentError: Something that can't be an id.
        """
        return self._run(self._asking.examples(ids, index, timeout))

    def close(self) -> None:
        """Gives back the connection or the opened index; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
