"""The order of a search: quantize what is there, try cuts, heal the promising ones a little, and of those the better
half more (successive halving), and build what is good enough."""

from dataclasses import replace

from compress.search.constraints import Figures
from compress.search.explore import Exploration
from compress.search.forecast import Forecast, Prediction
from compress.search.latency_table import Table
from compress.search.refine import Refinement
from compress.search.search_candidate import Candidate
from compress.search.space import axes
from compress.search.state import Board, Publish
from compress.search.study import Study, described
from compress.search.trial import Outcome
from compress.search.trial_runner import Workshop
from laconic.errors import RecipeError
from laconic.models.source import GraphSource

ROUNDS = 10
"""How often the search goes from cuts to artifacts, at most."""


def search(shop: Workshop, publish: Publish, trials: int | None = None) -> Board:
    """What stands at the end; the best one's artifact is at the destination. publish: puts an artifact there. trials:
    settings that may be tried at most. Raises RecipeError where the source cannot be worked on at all."""
    board = Board(shop, publish)
    plain = begin(board)
    assert plain.built is not None
    assert plain.outcome is not None
    found = axes(plain.outcome.cells)
    if found and (board.aim.speed or not board.met):
        table = Table(plain.built.option, shop.cache, plain.built.precision)
        board.forecast = Forecast(table, plain.outcome.cells, plain.outcome.size, plain.built)
        study = Study(found, shop.recipe.seed)
        exploration = Exploration(board, study, float("inf") if trials is None else float(trials))
        refinement = Refinement(board)
        for _ in range(ROUNDS):
            before = board.work
            exploration.run()
            refinement.run()
            if board.work == before or shop.budget.left <= 0:
                break
    conclude(board)
    return board


def begin(board: Board) -> Candidate:
    """Quantize what is there: the first artifact, from which is learned how fast anything else will be."""
    shop = board.shop
    plain = Candidate({}, Prediction(0.0, 1.0, 0.0))
    graph = isinstance(shop.base.source, GraphSource)
    outcome = Outcome(Figures(1.0, 1.0, 0.0, 0.0)) if graph else shop.tried([plain], "load")[0]
    if outcome.figures is None:
        raise RecipeError(outcome.error)
    plain.take(outcome, board.aim)
    board.candidates[described({})] = plain
    board.build(plain)
    assert plain.built is not None
    # Few samples have a wide interval, whatever is done: it is asked for where quantization alone keeps to it.
    shop.aim = replace(board.aim, certain=not board.aim.uncertain(plain.built.highest))
    return plain


def conclude(board: Board) -> None:
    """The nearest to the goal is built, if nothing met it."""
    nearest = min((each for each in board.open if not each.built), key=lambda each: each.shortfall, default=None)
    if nearest is not None and not board.met and board.shop.time_for("build"):
        board.build(nearest)
    board.publish()
