"""The account book of memory, against a plain replay of what was written into it."""

from hypothesis import given
from hypothesis import strategies as st

from train.offload.memory_accounting import CATEGORIES
from train.planner.memory_timeline import SIDES, AllocationLog

BIRTH = st.tuples(st.just("born"), st.integers(0, 100), st.sampled_from(SIDES), st.sampled_from((None, *CATEGORIES)))
CHANGE = st.tuples(st.just("resized"), st.integers(0, 40), st.integers(0, 100))
DEATH = st.tuples(st.just("resized"), st.integers(0, 40), st.just(0))
MOVE = st.tuples(st.just("move"), st.sampled_from(("forward", "backward", "optimizer")), st.sampled_from(("", "0/2")))
CLAIM = st.tuples(st.just("claim"), st.integers(0, 40), st.sampled_from(CATEGORIES), st.sampled_from((None, *SIDES)))
STORIES = st.lists(st.one_of(BIRTH, BIRTH, CHANGE, DEATH, MOVE, CLAIM), max_size=60)


def write(story):
    """The log of a story, and the same as plain lists: the blocks, and (number, size, place) of each event."""
    log, blocks, events, place = AllocationLog(), [], [], 0
    for verb, *said in story:
        if verb == "born":
            size, side, category = said
            assert log.allocate(size, side, category) == len(blocks)
            phase = log.positions[place][0]
            blocks.append([size, side, category or ("activations" if phase == "forward" else "temporaries")])
            events.append((len(blocks) - 1, size, place))
        elif verb == "move":
            log.enter(*said)
            place += 1
        elif blocks:
            number = said[0] % len(blocks)
            if verb == "resized":
                log.resize(number, said[1])
                if blocks[number][0] != said[1]:
                    events.append((number, said[1], place))
                blocks[number][0] = said[1]
            else:
                log.assign(number, said[1], said[2])
                blocks[number][1:] = [said[2] or blocks[number][1], said[1]]
    return log, blocks, events


def replay(blocks, events):
    """After each event, the bytes of each side and category, one block at a time."""
    alive, timeline = {}, []
    for number, size, _ in events:
        alive[number] = size
        sums = {(side, category): 0 for side in SIDES for category in CATEGORIES}
        for each, held in alive.items():
            sums[blocks[each][1], blocks[each][2]] += held
        timeline.append(sums)
    return timeline


def device(sums):
    return sum(sums["device", category] for category in CATEGORIES)


@given(STORIES)
def test_the_peak_and_what_it_is_made_of_are_those_of_a_replay(story):
    log, blocks, events = write(story)
    timeline, wanted = log.build_timeline(), replay(blocks, events)
    assert timeline.peak() == max([0, *map(device, wanted)])
    assert sum(timeline.at_peak().values()) == timeline.peak()
    if wanted:
        top = next(sums for sums in wanted if device(sums) == max(map(device, wanted)))
        assert timeline.at_peak() == {category: top["device", category] for category in CATEGORIES}
        assert timeline.host.tolist() == [sum(sums["host", each] for each in CATEGORIES) for sums in wanted]
        for side in SIDES:
            for category, values in timeline.series(side).items():
                assert values.tolist() == [sums[side, category] for sums in wanted]


@given(STORIES)
def test_the_peak_of_each_phase_is_the_most_after_an_event_of_it(story):
    log, blocks, events = write(story)
    wanted: dict[str, int] = {}
    for (_, _, place), sums in zip(events, replay(blocks, events), strict=True):
        phase = log.positions[place][0]
        wanted[phase] = max(wanted.get(phase, 0), device(sums))
    assert {phase: sum(part.values()) for phase, part in log.build_timeline().phases().items()} == wanted


@given(STORIES, STORIES)
def test_a_course_may_begin_anywhere_with_what_is_alive(first, then):
    log, blocks, _ = write(first)
    log.start()
    alive = sum(size for size, side, _ in blocks if side == "device")
    timeline = log.build_timeline()
    assert (int(timeline.device[-1]) if timeline.device.size else 0) == alive
    assert timeline.peak() == alive
