"""`dualform query QUESTION`: one question, to a server or to an index on disk."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualform.cli.attribute import add_query, add_self_influence
from dualform.cli.connection import add_connection, open_client
from dualform.cli.errors import CommandError
from dualform.cli.output import Progress, cell, print_json, print_table

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dualform.client import ChosenPlan, Coverage, SumsResult


def add_to(commands: Any) -> None:
    """Adds the commands' arguments."""
    parser = commands.add_parser(
        "query",
        allow_abbrev=False,
        help="ask a server or an index",
        description="Asks one question about the queries in a .npy file.",
    )
    kinds = parser.add_subparsers(metavar="QUESTION", required=True)
    top_k = _question(
        kinds, "top-k", _top_k, "the rows with the largest weight, cosine or contribution"
    )
    top_k.add_argument("-k", type=int, default=10, help="rows per query (default 10)")
    top_k.add_argument("--group-by", metavar="COLUMN", help="the k best rows of each value")
    _ranking_options(top_k)
    _plan_options(top_k, ["certified", "device", "distinct_keys", "flat", "scan"])
    top_k.add_argument(
        "--distinct", metavar="COLUMN", help="of rows with the same value only the best"
    )
    what = "the groups whose rows' weights or contributions add up to most"
    groups = _question(kinds, "top-groups", _top_groups, what)
    groups.add_argument(
        "--by", metavar="COLUMN", required=True, help="whose values are the groups: example, label"
    )
    groups.add_argument("-k", type=int, default=10, help="groups per query (default 10)")
    _ranking_options(groups)
    _plan_options(groups, ["key_sums", "distinct_keys", "device", "scan"])
    add_query(kinds)
    add_self_influence(kinds)
    sums = _question(kinds, "sums", _sums, "total attention weight per group")
    sums.add_argument("--group-by", metavar="COLUMN", required=True, help="what to sum over")
    sums.add_argument("--absolute", action="store_true", help="sum absolute values")
    sums.add_argument(
        "--bins", type=_edges, metavar="A,B,…", help="sum over ranges of a numeric column"
    )
    _plan_options(sums, ["key_sums", "distinct_keys", "device", "scan"])
    profile = _question(kinds, "profile", _profile, "total attention weight over training steps")
    profile.add_argument("--bins", type=int, default=50, help="equal parts (default 50)")
    profile.add_argument("--absolute", action="store_true", help="sum absolute values")
    weights = _question(kinds, "weights", _weights, "every attention weight, to a .npy file")
    weights.add_argument(
        "--out", required=True, type=Path, metavar="w.npy", help="float32 [n, rows] goes there"
    )
    output = _question(kinds, "output", _output, "the dual output: initial part and contributions")
    output.add_argument("--at-step", type=int, metavar="S", help="the layer after S steps")
    output.add_argument("--group-by", metavar="COLUMN", help="each group's part alone")
    for command in (top_k, groups, sums):
        command.add_argument(
            "--partial",
            action="store_true",
            help="of an index on several machines, answer without rows that are out of reach",
        )
    for command in (top_k, groups, output):
        command.add_argument(
            "--max-residual",
            type=float,
            metavar="SHARE",
            help="how much of an output no row may explain (default 1e-4)",
        )
    _plan_options(output, ["rebuilt", "parts", "device", "scan"])


def _ranking_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--order", choices=["largest", "smallest", "absolute"], default="largest")
    parser.add_argument("--rank-by", choices=["weight", "cosine", "contribution"], default="weight")
    parser.add_argument("--unit", type=int, metavar="U", help="contributions to output unit U")
    parser.add_argument(
        "--direction",
        type=Path,
        metavar="g.npy",
        help="contributions along these, float32 [n, d_out], one for each query",
    )
    parser.add_argument(
        "--at-step", type=int, metavar="S", help="contributions to the layer after S steps"
    )


def _plan_options(parser: argparse.ArgumentParser, strategies: list[str]) -> None:
    parser.add_argument("--strategy", choices=["auto", *strategies], default="auto")
    parser.add_argument("--explain-plan", action="store_true", help="tell the strategy, and why")


def _question(kinds: Any, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, allow_abbrev=False, help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    add_connection(parser)
    parser.add_argument("--layer", required=True, metavar="L", help="as in model.named_modules()")
    parser.add_argument(
        "--query", required=True, type=Path, metavar="q.npy", help="float32 [n, d_in]"
    )
    if run is not _weights:
        parser.add_argument("--where", metavar="EXPR", help="such as 'label = 6 and step < 3000'")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _edges(text: str) -> list[float]:
    """Bin edges from text such as "0,1000,3000"."""
    try:
        return [float(edge) for edge in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds what is no number; give ascending edges such as 0,1000,3000"
        ) from None


def _directions(path: Path | None) -> npt.NDArray[np.float32] | None:
    return None if path is None else read_queries(path, "d_out")


def read_queries(path: Path, width: str = "d_in") -> npt.NDArray[np.float32]:
    """A .npy file as float32 [n, d_in], or as directions, [n, d_out].

    Raises:
        CommandError: Not there, no .npy file, pickled objects, not float32, not two-dimensional.
    """
    import numpy as np

    save = "np.save('q.npy', queries.astype(np.float32)) writes one"
    try:
        with open(path, "rb") as file:
            queries = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error.strerror or error}") from None
    except MemoryError:
        raise CommandError(f"{path} announces more than fits into memory; {save}") from None
    except (ValueError, EOFError) as error:
        raise CommandError(f"{path} is no .npy file of numbers ({error}); {save}") from None
    if queries.dtype != np.float32:
        raise CommandError(f"{path} holds {queries.dtype}; float32 is needed: {save}")
    if queries.ndim != 2:
        hint = "; save queries.reshape(1, -1) for a single query" if queries.ndim == 1 else ""
        raise CommandError(f"{path} has shape {list(queries.shape)}; [n, {width}] is needed{hint}")
    return queries


def _ranking(options: argparse.Namespace) -> dict[str, Any]:
    """What the rankings of rows and of groups are told alike."""
    return {
        "where": options.where,
        "order": options.order,
        "rank_by": options.rank_by,
        "unit": options.unit,
        "direction": _directions(options.direction),
        "at_step": options.at_step,
        "max_residual": options.max_residual,
        "strategy": options.strategy,
        "explain_plan": options.explain_plan,
        "partial": options.partial,
        "index": options.index,
        "timeout": options.timeout,
    }


def _top_k(options: argparse.Namespace) -> int:
    queries = read_queries(options.query)
    with open_client(options) as client:
        hits = client.top_k(
            options.layer,
            queries,
            k=options.k,
            group_by=options.group_by,
            distinct=options.distinct,
            **_ranking(options),
        )
    if options.json:
        print_json(
            {
                "rows": hits.rows,
                "scores": hits.scores,
                "counts": hits.counts,
                "columns": dict(hits.columns),
                "groups": hits.groups,
                "coverage": _coverage(hits.coverage),
                **_plan(hits.plan),
            }
        )
        return 0
    columns = dict(hits.columns)
    if hits.counts is not None:
        columns = {"count": hits.counts, **columns}
    headers = ["rank", "row", "score", *columns]
    for query in range(len(queries)):
        for place, title in _parts(query, options.group_by, hits.groups):
            print(title)
            found = hits.rows[place] >= 0
            lines = zip(
                range(int(found.sum())),
                hits.rows[place][found],
                hits.scores[place][found],
                *(column[place][found] for column in columns.values()),
                strict=True,
            )
            print_table(headers, lines)
            print()
    _print_coverage(hits.coverage)
    _print_plan(hits.plan)
    return 0


def _top_groups(options: argparse.Namespace) -> int:
    queries = read_queries(options.query)
    with open_client(options) as client:
        best = client.top_groups(
            options.layer,
            queries,
            by=options.by,
            k=options.k,
            **_ranking(options),
        )
    if options.json:
        print_json(
            {
                "groups": best.groups,
                "scores": best.scores,
                "counts": best.counts,
                "coverage": _coverage(best.coverage),
                **_plan(best.plan),
            }
        )
        return 0
    for query in range(len(queries)):
        print(f"query {query}")
        found = best.counts[query] > 0
        columns = (best.groups, best.counts, best.scores)
        lines = zip(range(len(found)), *(part[query][found] for part in columns), strict=False)
        print_table(["rank", options.by, "rows", "sum"], lines)
        print()
    _print_coverage(best.coverage)
    _print_plan(best.plan)
    return 0


def _sums(options: argparse.Namespace) -> int:
    queries = read_queries(options.query)
    with open_client(options) as client:
        sums = client.sums(
            options.layer,
            queries,
            group_by=options.group_by,
            absolute=options.absolute,
            where=options.where,
            bins=options.bins,
            strategy=options.strategy,
            explain_plan=options.explain_plan,
            partial=options.partial,
            index=options.index,
            timeout=options.timeout,
        )
    return _print_sums(options, sums, options.group_by)


def _profile(options: argparse.Namespace) -> int:
    queries = read_queries(options.query)
    with open_client(options) as client:
        sums = client.profile(
            options.layer,
            queries,
            bins=options.bins,
            absolute=options.absolute,
            where=options.where,
            index=options.index,
            timeout=options.timeout,
        )
    return _print_sums(options, sums, "from step")


def _print_sums(options: argparse.Namespace, sums: SumsResult, title: str) -> int:
    if options.json:
        print_json(
            {
                "groups": sums.groups,
                "values": sums.values,
                "counts": sums.counts,
                "coverage": _coverage(sums.coverage),
                **_plan(sums.plan),
            }
        )
        return 0
    for query in range(len(sums.values)):
        print(f"query {query}")
        print_table(
            [title, "rows", "sum"],
            zip(sums.groups, sums.counts, sums.values[query], strict=True),
        )
        print()
    _print_coverage(sums.coverage)
    _print_plan(sums.plan)
    return 0


def _weights(options: argparse.Namespace) -> int:
    import numpy as np

    queries = read_queries(options.query)
    out: Path = options.out
    with open_client(options) as client:
        layers = client.index(options.index, timeout=options.timeout).layers
        if options.layer not in layers:
            names = ", ".join(map(repr, layers))
            raise CommandError(f"no layer {options.layer!r}; the layers are {names}")
        shape = (len(queries), layers[options.layer].rows)
        try:
            # "x": nothing is overwritten.
            open(out, "xb").close()
        except FileExistsError:
            raise CommandError(f"{out} is there already; name another file, or remove it") from None
        except OSError as error:
            raise CommandError(f"{out} can't be written: {error.strerror or error}") from None
        done = False
        try:
            weights = np.lib.format.open_memmap(out, "w+", np.float32, shape)
            with Progress("weights", "rows") as progress:
                for chunk in client.stream_weights(
                    options.layer, queries, index=options.index, timeout=options.timeout
                ):
                    end = chunk.start + chunk.weights.shape[1]
                    weights[:, chunk.start : end] = chunk.weights
                    progress(end, shape[1])
            weights.flush()
            done = True
        finally:
            if not done:
                out.unlink()
    if options.json:
        print_json({"file": str(out), "shape": shape})
    else:
        print(f"{out}: float32 {list(shape)}")
    return 0


def _output(options: argparse.Namespace) -> int:
    queries = read_queries(options.query)
    with open_client(options) as client:
        output = client.dual_output(
            options.layer,
            queries,
            where=options.where,
            at_step=options.at_step,
            group_by=options.group_by,
            max_residual=options.max_residual,
            strategy=options.strategy,
            explain_plan=options.explain_plan,
            index=options.index,
            timeout=options.timeout,
        )
    if options.json:
        print_json(
            {
                "values": output.values,
                "initial": output.initial,
                "trained": output.trained,
                "residual": output.residual,
                "groups": output.groups,
                "counts": output.counts,
                "coverage": _coverage(output.coverage),
                **_plan(output.plan),
            }
        )
        return 0
    units = range(output.values.shape[-1])
    for query in range(len(queries)):
        print(f"query {query}")
        columns = {"unit": units, "initial": output.initial[query]}
        if output.groups is None:
            columns["output"] = output.values[query]
            if output.trained is not None:
                columns["trained layer"] = output.trained[query]
            if output.residual is not None and options.max_residual is not None:
                columns["residual"] = output.residual[query]
        else:
            for group, values in zip(output.groups, output.values[query], strict=True):
                columns[f"{options.group_by} {_group(group)}"] = values
            if output.residual is not None:
                columns["residual"] = output.residual[query]
        print_table(list(columns), zip(*columns.values(), strict=True))
        print()
    _print_coverage(output.coverage)
    _print_plan(output.plan)
    return 0


def _parts(
    query: int, column: str | None, groups: list[Any] | None
) -> list[tuple[tuple[int, ...], str]]:
    """Where a query's hits stand, per group where there are groups, and what to call them."""
    if groups is None:
        return [((query,), f"query {query}")]
    return [
        ((query, place), f"query {query}, {column} {_group(group)}")
        for place, group in enumerate(groups)
    ]


def _group(group: Any) -> str:
    return "without a value" if group is None else cell(group)


def _coverage(coverage: Coverage) -> dict[str, int]:
    return {
        "rows": coverage.rows,
        "total": coverage.total,
        "nonfinite": coverage.nonfinite,
        "dropped": coverage.dropped,
        "missing": coverage.missing,
    }


def _print_coverage(coverage: Coverage) -> None:
    beside = (
        f"; {coverage.nonfinite:,} with keys that are not finite, never ranked"
        if coverage.nonfinite
        else ""
    )
    if coverage.dropped:
        beside += f"; {coverage.dropped:,} more of training were not recorded"
    if coverage.missing:
        beside += f"; WITHOUT {coverage.missing:,} rows on machines that are out of reach"
    print(f"covers {coverage.rows:,} of {coverage.total:,} rows{beside}")


def _plan(plan: ChosenPlan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    costs = dict(plan.costs)
    return {"plan": {"strategy": plan.strategy, "reason": plan.reason, "costs": costs}}


def _print_plan(plan: ChosenPlan | None) -> None:
    if plan is None:
        return
    costs = ", ".join(f"{name} {1e3 * cost:.3g} ms" for name, cost in plan.costs.items())
    print(f"strategy {plan.strategy}: {plan.reason}; estimates: {costs}")
