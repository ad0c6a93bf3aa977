"""A diagnosis as Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any


def diagnosis_tables(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """
    :param results: Result of ``diagnose_run``
    :return: lines of Markdown
    """
    yield from _estimator_table(results)
    yield "| steps | entropy | explained variance | size of A | scatter of G - V~ | slope of A | of improbable actions |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        x = result["critic"]
        yield (
            f"| {result['steps']:,} | {_text(x, 'entropy', '.2f')} | {_text(x, 'explained_variance', '.2f')} "
            f"| {_text(x, 'advantage_size', '.2g')} | {_text(x, 'return_scatter', '.2g')} | {_text(x, 'slope', '.2f')} "
            f"| {_text(x, 'slope_improbable', '.2f')} |"
        )
    yield from _branch_table(results)


def _estimator_table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    # There are none without an actor
    if not any(result["estimators"] for result in results):
        return
    yield "| steps | estimator | expected gradient, squared | variance | noise / signal | cosine | difference | ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        for name, x in result["estimators"].items():
            yield (
                f"| {result['steps']:,} | {name} | {_text(x, 'gradient_square', '.2g')} | {_text(x, 'variance', '.2g')} "
                f"| {_text(x, 'noise_to_signal', '.2g')} | {_text(x, 'cosine', '.3f')} | {x['difference']:.1e} "
                f"| {x['milliseconds']:.1f} |"
            )
    yield ""


def _branch_table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    with_branches = [result for result in results if "branches" in result]
    if not with_branches:
        return
    yield ""
    yield (
        "| steps | states x repeats | differences of Q | of returns | slope | correlation | right signs | halves agree "
        "| slope, improbable actions | right signs | halves agree |"
    )
    yield "|---" * 11 + "|"
    for result in with_branches:
        x = result["branches"]
        sizes = [_text(x, name, ".2g") for name in ("q_difference", "return_difference")]
        names = ("slope", "correlation", "right_signs", "halves", "slope_improbable", "right_signs_improbable")
        cells = [_text(x, name, ".2f") for name in (*names, "halves_improbable")]
        yield f"| {result['steps']:,} | {x['states']} x {x['repeats']} | {' | '.join([*sizes, *cells])} |"


def _text(figures: dict[str, float | None], name: str, form: str) -> str:
    figure = figures[name]
    if f"{name}_error" not in figures:
        return "-" if figure is None else f"{figure:{form}}"
    error = figures[f"{name}_error"]
    # A figure whose error is unknown is noise
    return "-" if figure is None or error is None else f"{figure:{form}} +/- {error:{form}}"
