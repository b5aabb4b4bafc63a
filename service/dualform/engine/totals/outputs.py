"""The dual output of a layer: from which stored weights it starts, and which rows are added.

Without filter or groups, rows before a stored state j <= at_step are not scanned: their sum is one
product with that state's weight (docs/decisions/0007-stored-states.md). For the trained layer all
rows are one product with the weight that `index build` added up to
(docs/decisions/0008-rebuilt-weights.md).
Groups of a column whose parts are stored, and selections that are whole groups of one, come in one
product per group. Under an optimizer of no family no row is known to have added anything: the
initial part is the initial weight, and what it moved by since the remainder. All else is a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dualform.engine.errors import FailedPreconditionError
from dualform.engine.memory.fold import Reducer, fold
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.memory.states import State, States
from dualform.engine.plan.costs import output_costs
from dualform.engine.plan.plan import Plan, check_strategy, chosen
from dualform.engine.totals.coefficients import (
    LayerCoefficients,
    initial_part,
    layer_coefficients,
    left_behind,
    plain_output,
)
from dualform.engine.totals.followed import (
    Elsewhere,
    Followed,
    FollowedParts,
    affine,
    outputs_of,
)
from dualform.engine.totals.on_devices import OnDevices, rows_added
from dualform.engine.totals.row_parts import rows_part
from dualform.engine.totals.stored_parts import WholeGroups, group_outputs
from dualform.optimizers import Affine
from dualform.questions import MAX_RESIDUAL
from dualform.store.files import FileEntry
from dualform.store.grouping import Grouping
from dualform.store.index import INITIAL, IndexLayer
from dualform.store.ledger import Ledger

_UNKNOWN = "what rows moved the weight by is not known under an optimizer of no family"

_NOISE = (
    "a bias without a true gradient, as before batch norm or in attention's keys, is moved by "
    "rounding noise under this optimizer, as `dualform index verify` says; bias=False avoids it"
)


@dataclass(frozen=True)
class PreparedOutput:
    """A question for one layer's dual output, its columns and filter looked up.

    Attributes:
        queries: float32 [n, d_in], finite.
        at_step: After so many steps; None for the trained layer.
        end: The same as a number.
        grouping: Groups to keep apart, or None for the whole.
        selected: bool [total], by position: the rows that take part, all before `end`.
        filtered: A filter, not `end` alone, selected them.
        parts: The stored parts that the selected rows are made of, or why there are none.
        strategy: How; "auto" takes the first that applies.
        max_residual: Of an output, how much no row may explain for it to be given.
        explained: What rows moved weights by is known; not under an optimizer of no family.
        elsewhere: Adds up rows that are not here: given the step from which on they count, and
            whether the groups are kept apart, what they add, float64 [n, groups, d_out]. None where
            the layer has them.
        followed_elsewhere: Likewise follows the layer, where rows have no coefficients.
        about: Which rows take part, where they are not here: equal for the same.
        inputs: int64 [n], the input of the user's that each query is of, where layers are asked
            together; None where the queries are what the user gave.
    """

    queries: torch.Tensor
    at_step: int | None
    end: int
    grouping: Grouping | None
    selected: np.ndarray
    filtered: bool
    parts: WholeGroups | str
    strategy: str
    max_residual: float = MAX_RESIDUAL
    explained: bool = True
    elsewhere: Callable[[int, bool], np.ndarray] | None = None
    followed_elsewhere: Elsewhere | None = None
    about: bytes = b""
    inputs: np.ndarray | None = None


@dataclass(frozen=True)
class Parts:
    """The answer in float64.

    Attributes:
        values: [n, d_out] with the initial part, or the groups' parts [n, groups, d_out].
        initial: [n, d_out].
        trained: [n, d_out], the output by the trained weights; None with at_step, or without them.
        residual: [n, d_out], the whole less `initial` and all rows' parts; None where no stored
            weights tell.
    """

    values: np.ndarray
    initial: np.ndarray
    trained: np.ndarray | None
    residual: np.ndarray | None


def why_not_rebuilt(layer: IndexLayer, question: PreparedOutput) -> str | None:
    """Why the stored sum of all rows can't answer; None where it can."""
    if question.at_step is not None:
        return "it holds the trained layer's coefficients, not those at a step"
    if question.grouping is not None or question.filtered:
        return "it holds all rows together, without filter and groups"
    return None if layer.rebuilt is not None else f"the index has none for layer {layer.name!r}"


def plan(layer: Layer, question: PreparedOutput, rows: int, on: OnDevices | str) -> Plan:
    """How the output is found, of so many rows.

    Args:
        layer: Whose.
        question: What is asked.
        rows: How many rows take part.
        on: How devices would add up the rows, or why they can't.

    Raises:
        InvalidArgumentError: The strategy is unknown, or does not apply.
    """
    if not question.explained:
        check_strategy(
            question.strategy,
            {"rebuilt": None, "parts": _UNKNOWN, "device": _UNKNOWN, "scan": _UNKNOWN},
        )
        return Plan("rebuilt", f"{_UNKNOWN}: all that the weight moved by is the remainder", {})
    parts = question.parts
    refused = {
        "rebuilt": why_not_rebuilt(layer.manifest, question),
        "parts": parts if isinstance(parts, str) else None,
        "device": on if isinstance(on, str) else None,
        "scan": None,
    }
    check_strategy(question.strategy, refused)
    taken = 0 if isinstance(parts, str) else int(np.count_nonzero(parts.taken))
    costs = output_costs(layer, len(question.queries), rows, taken)
    costs = {name: cost for name, cost in costs.items() if refused[name] is None}
    if not isinstance(on, str):
        costs = {name: cost * on.devices.cpu_pace for name, cost in costs.items()}
        on.devices.note(layer, costs["scan"])
        costs["device"] = on.seconds
    if question.strategy != "auto":
        return chosen(question.strategy, costs, "")
    if "rebuilt" in costs:
        return Plan("rebuilt", "the weight that all rows add up to is stored", costs)
    if not isinstance(parts, str):
        reason = f"what the rows of {taken:,} values of {parts.stored.column!r} became is stored"
        return Plan("parts", reason, costs)
    reason = f"no rebuilt weight: {refused['rebuilt']}; no stored parts: {refused['parts']}"
    return chosen("auto", costs, reason)


class DualOutputs:
    """Answers for an index.

    Args:
        ledger: What the optimizer did.
        states: The index's stored weights.
    """

    def __init__(self, ledger: Ledger, states: States) -> None:
        self._ledger = ledger
        self._states = states
        self._whole: dict[str, LayerCoefficients] = {}
        self._followed = FollowedParts(ledger)
        self._remainders: dict[str, Affine | None] = {}

    def answer(
        self,
        layer: Layer,
        question: PreparedOutput,
        stop: Stop | None,
        also: Sequence[Reducer] = (),
        on: OnDevices | None = None,
    ) -> Parts:
        """One layer's output.

        Args:
            layer: Whose.
            question: What is asked.
            stop: Asked between tiles.
            also: What else takes the tiles of the scan of all selected rows; without such a scan
                it gets none.
            on: How devices add up the rows; None where the CPU does.

        Raises:
            DamagedError: A file that is needed does not hold what was written.
        """
        stored = _stored(layer.manifest, question)
        if not question.explained:
            parts = self._unexplained(layer, question)
            if also:
                fold(layer, question.queries, question.selected, also, stop)
        elif stored is not None:
            parts = self._by_stored_parts(layer, question, stored)
            if also:
                fold(layer, question.queries, question.selected, also, stop)
        elif not self._ledger.family.scalar:
            parts = self._by_following(layer, question, stop)
            if also:
                fold(layer, question.queries, question.selected, also, stop)
        else:
            parts = self._by_coefficients(layer, question, stop, also, on)
        if parts.residual is None and question.at_step is None:
            residual = self.remainder(layer.manifest, question.queries)
            parts = replace(parts, residual=residual)
        if parts.residual is not None:
            whole = parts.trained
            if whole is None:
                rows = parts.values if question.grouping is None else parts.values.sum(axis=1)
                whole = rows + parts.residual
                whole = whole if question.grouping is None else whole + parts.initial
            share = shares(parts.residual, whole)
            if not (share <= question.max_residual).all():
                raise self._too_large(layer, share, question.max_residual, question.inputs)
        return parts

    def check(self, layer: Layer, queries: torch.Tensor, most: float) -> None:
        """Refuse what rows do not explain well enough of the trained layer's outputs.

        Args:
            layer: Which.
            queries: float32 [n, d_in].
            most: The largest |residual| / |whole|, Euclidean, of a query that is answered.

        Raises:
            FailedPreconditionError: The remainder is larger.
        """
        residual = self.remainder(layer.manifest, queries)
        whole = self.trained(layer.manifest, queries)
        if residual is not None and whole is not None:
            share = shares(residual, whole)
            if not (share <= most).all():
                raise self._too_large(layer, share, most, None)

    def unexplained(self, layer: IndexLayer) -> dict[str, float]:
        """Of each parameter of a layer, what part of its length no row explains, in the trained
        layer. Empty where that is not known."""
        found = self._remainder_as_weights(layer)
        if found is None or layer.final is None:
            return {}
        final = self._states.read(layer.final)
        parts = {layer.weight: found.weight}
        if layer.bias is not None and found.bias is not None:
            parts[layer.bias] = found.bias
        return {
            name: float(part.norm() / torch.clamp(final[name].double().norm(), min=1e-300))
            for name, part in parts.items()
        }

    def remainder(self, layer: IndexLayer, queries: torch.Tensor) -> np.ndarray | None:
        """What neither the initial part nor any row explains of the trained layer's outputs.

        Args:
            layer: Which.
            queries: float32 [n, d_in].

        Returns:
            float64 [n, d_out]; None where the index does not know the trained weights, or what all
            rows add up to.
        """
        unexplained = self._remainder_as_weights(layer)
        return None if unexplained is None else outputs_of(unexplained, queries)

    def _too_large(
        self, layer: Layer, share: np.ndarray, most: float, inputs: np.ndarray | None
    ) -> FailedPreconditionError:
        """The refusal of outputs of which too much is explained by no row: how much, and why."""
        worst = int(np.argmax(share))
        who, leave_out = f"query {worst}", ""
        if inputs is not None:
            who = f"input {inputs[worst]}"
            leave_out = " leave the layer out with layers=[...],"
        marks = [f"from step {m.from_step} on {m.reason}" for m in layer.manifest.inexact]
        known = "; ".join(marks) or self._where_it_lies(layer.manifest)
        return FailedPreconditionError(
            f"layer {layer.name!r}: the rows leave {share[worst]:.2g} of the output for {who} "
            f"unexplained, as residual{f' ({known})' if known else ''}, and max_residual is "
            f"{most:g};{leave_out} pass a larger max_residual to be answered with that "
            "residual beside the rows, or ask for weights (top-k, sums), which are exact",
            field="max_residual",
            reason="RESIDUAL",
        )

    def _where_it_lies(self, layer: IndexLayer) -> str:
        """In which parameter most of the remainder of a layer without marks lies."""
        of = self.unexplained(layer)
        if layer.bias not in of or of[layer.weight] >= of[layer.bias]:
            return ""
        noise = "" if self._ledger.family.scalar else f"; {_NOISE}"
        return f"most in {layer.bias!r}, {of[layer.bias]:.2g} of which no row explains{noise}"

    def _remainder_as_weights(self, layer: IndexLayer) -> Affine | None:
        if layer.name not in self._remainders:
            self._remainders[layer.name] = self._remainder_of(layer)
        return self._remainders[layer.name]

    def _remainder_of(self, layer: IndexLayer) -> Affine | None:
        """The trained weight and bias less the initial part and all rows: the same, as weights."""
        if not self._ledger.family.explains and layer.final is not None:
            final, first = self._states.read(layer.final), self._states.read(layer.initial)
            return _difference(affine(final, layer), affine(first, layer))
        if layer.rebuilt is None or layer.final is None:
            return None
        rebuilt, final = self._states.read(layer.rebuilt), self._states.read(layer.final)
        trained, rows = affine(final, layer), affine(rebuilt, layer)
        if self._ledger.family.scalar:
            first = self._states.read(layer.initial)
            without_rows = self._trained_without_rows(layer)
            arrays = {name: tensor.numpy() for name, tensor in first.items()}
            of_bias = None
            if layer.bias is not None and without_rows.bias is not None:
                of_bias = torch.from_numpy(left_behind(arrays, layer.bias, without_rows.bias))
            of_weight = torch.from_numpy(left_behind(arrays, layer.weight, without_rows.weight))
            initial = Affine(of_weight, of_bias)
        else:
            initial = affine(rebuilt, layer, INITIAL)
        return _difference(_difference(trained, rows), initial)

    def _unexplained(self, layer: Layer, question: PreparedOutput) -> Parts:
        """Under an optimizer of no family: the initial layer, and rows that added nothing."""
        manifest, queries, grouping = layer.manifest, question.queries, question.grouping
        initial = outputs_of(affine(self._states.read(manifest.initial), manifest), queries)
        values = initial
        if grouping is not None:
            values = np.zeros((len(queries), len(grouping.values), layer.d_out))
        return Parts(values, initial, self._trained(manifest, question), None)

    def _by_stored_parts(
        self, layer: Layer, question: PreparedOutput, stored: WholeGroups
    ) -> Parts:
        """By what the rows of each value of a column became."""
        manifest, queries = layer.manifest, question.queries
        if self._ledger.family.scalar:
            first = self._states.read(manifest.initial)
            coefficients = self._trained_without_rows(manifest)
            initial = initial_part(manifest, first, coefficients, queries)
        else:
            assert manifest.rebuilt is not None
            state = self._states.read(manifest.rebuilt)
            initial = outputs_of(affine(state, manifest, INITIAL), queries)
        rows = group_outputs(layer, self._states, stored, queries)
        values = rows if question.grouping is not None else initial + rows.sum(axis=1)
        return Parts(values, initial, self._trained(manifest, question), None)

    def _by_following(self, layer: Layer, question: PreparedOutput, stop: Stop | None) -> Parts:
        """By the parts of the layer's weights, each followed through training."""
        manifest, grouping, queries = layer.manifest, question.grouping, question.queries
        trained = self._trained(manifest, question)
        rebuilt = self._rebuilt(manifest, question)
        if rebuilt is not None:
            state = self._states.read(rebuilt)
            initial = outputs_of(affine(state, manifest, INITIAL), queries)
            return Parts(
                initial + outputs_of(affine(state, manifest), queries), initial, trained, None
            )
        first = self._states.read(manifest.initial)
        found = self._follow(layer, question, first, 0, grouping, stop)
        initial = outputs_of(found.initial, queries)
        rows = np.stack([outputs_of(part, queries) for part in found.parts], axis=1)
        values = rows[:, 0] + initial if grouping is None else rows
        residual = None
        if question.at_step is not None and not question.filtered:
            start, entry = _latest_state(manifest, question.at_step)
            if start > 0:
                # The trained weights of that time, moved on by the rows since: what they differ by
                # from all that is explained since the first step is the remainder.
                since = self._follow(layer, question, self._states.read(entry), start, None, stop)
                whole = outputs_of(since.initial, queries) + outputs_of(since.parts[0], queries)
                residual = whole - initial - rows.sum(axis=1)
        return Parts(values, initial, trained, residual)

    def _follow(
        self,
        layer: Layer,
        question: PreparedOutput,
        state: State,
        start: int,
        grouping: Grouping | None,
        stop: Stop | None,
    ) -> Followed:
        """The parts of the question's rows, from a state after so many steps."""
        return self._followed.find(
            layer, state, start, question.end, question.selected, grouping, stop,
            question.followed_elsewhere, question.about,
        )  # fmt: skip

    def _by_coefficients(
        self,
        layer: Layer,
        question: PreparedOutput,
        stop: Stop | None,
        also: Sequence[Reducer],
        on: OnDevices | None,
    ) -> Parts:
        """By the one coefficient that each step has."""
        manifest, grouping = layer.manifest, question.grouping
        rebuilt = self._rebuilt(manifest, question)
        first = self._states.read(manifest.initial)
        if rebuilt is not None:
            coefficients = self._trained_without_rows(manifest)
            initial = initial_part(manifest, first, coefficients, question.queries)
            values = initial + plain_output(manifest, self._states.read(rebuilt), question.queries)
            return Parts(values, initial, self._trained(manifest, question), None)
        coefficients = layer_coefficients(self._ledger, manifest, question.end)
        initial = initial_part(manifest, first, coefficients, question.queries)
        start, entry = 0, manifest.initial
        if question.at_step is not None and not question.filtered:
            start, entry = _latest_state(manifest, question.at_step)
        whole = None
        if start > 0:
            later = layer_coefficients(self._ledger, manifest, question.end, start)
            base = initial_part(manifest, self._states.read(entry), later, question.queries)
            since = question.selected & (layer.space.steps >= start)
            whole = base + self._rows(layer, question, later, None, since, stop, (), on)[:, 0]
            if grouping is None:
                return Parts(whole, initial, None, None)
        rows = self._rows(
            layer, question, coefficients, grouping, question.selected, stop, also, on
        )
        values = rows[:, 0] + initial if grouping is None else rows
        residual = None if whole is None else whole - initial - rows.sum(axis=1)
        return Parts(values, initial, self._trained(manifest, question), residual)

    def _rebuilt(self, layer: IndexLayer, question: PreparedOutput) -> FileEntry | None:
        """The stored sum of the layer's rows, where it is what answers."""
        why_not = why_not_rebuilt(layer, question)
        return (
            layer.rebuilt if why_not is None and question.strategy in ("auto", "rebuilt") else None
        )

    def _trained_without_rows(self, layer: IndexLayer) -> LayerCoefficients:
        """The trained layer's coefficients less those of its rows."""
        return self.trained_coefficients(layer).without_rows()

    def trained_coefficients(self, layer: IndexLayer) -> LayerCoefficients:
        """The trained layer's coefficients: two numbers a step, kept."""
        if layer.name not in self._whole:
            whole = layer_coefficients(self._ledger, layer, self._ledger.steps)
            self._whole[layer.name] = whole
        return self._whole[layer.name]

    def trained(self, layer: IndexLayer, queries: torch.Tensor) -> np.ndarray | None:
        """Outputs by the stored final weights, float64 [n, d_out]; None without these."""
        if layer.final is None:
            return None
        return plain_output(layer, self._states.read(layer.final), queries)

    def _trained(self, layer: IndexLayer, question: PreparedOutput) -> np.ndarray | None:
        return None if question.at_step is not None else self.trained(layer, question.queries)

    def _rows(
        self,
        layer: Layer,
        question: PreparedOutput,
        coefficients: LayerCoefficients,
        grouping: Grouping | None,
        selected: np.ndarray,
        stop: Stop | None,
        also: Sequence[Reducer],
        on: OnDevices | None,
    ) -> np.ndarray:
        queries = question.queries
        if question.elsewhere is not None:
            return question.elsewhere(coefficients.start, grouping is not None)
        if on is None:
            return rows_part(layer, queries, coefficients, grouping, selected, stop, also)
        added, left = rows_added(on, layer, queries, coefficients, grouping, selected, stop)
        if left.any():
            added += rows_part(layer, queries, coefficients, grouping, left, stop)
        return added


def _difference(whole: Affine, part: Affine) -> Affine:
    bias = None if whole.bias is None or part.bias is None else whole.bias - part.bias
    return Affine(whole.weight - part.weight, bias)


def _stored(layer: IndexLayer, question: PreparedOutput) -> WholeGroups | None:
    """The stored parts, where they are what answers."""
    parts = question.parts
    if isinstance(parts, str) or question.strategy not in ("auto", "parts"):
        return None
    whole = question.strategy == "auto" and why_not_rebuilt(layer, question) is None
    return None if whole else parts


def shares(residual: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """|residual| / |whole|, Euclidean, of outputs [n, d_out]: float64 [n], infinite where the whole
    is zero or a number is not finite."""
    with np.errstate(all="ignore"):
        size = np.linalg.norm(residual, axis=1)
        share = np.where(size == 0, 0.0, size / np.linalg.norm(whole, axis=1))
    return np.where(np.isnan(share), np.inf, share)


def _latest_state(layer: IndexLayer, at_step: int) -> tuple[int, FileEntry]:
    """The last stored state that is not later than a step: after how many steps, and its file."""
    return max(
        ((j, entry) for j, entry in ((0, layer.initial), *layer.states) if j <= at_step),
        key=lambda state: state[0],
    )
