"""A GPT's tracks on one device are its real ranks, and both are what the schedule's equation says."""

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F

from blockshock_lib import checkpoint, clip_grad_norm_, gpt
from blockshock_lib.comm import Group, Pending, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.gpt import streams
from blockshock_lib.layers.gpt.schedule import dropping
from blockshock_lib.studies.gpt import truth
from tests.layers.gpt import oracle
from tests.layers.gpt.test_schedule import SYNCS
from tests.layers.ranks import in_process

CONFIG = gpt.GPTConfig(width=16, heads=8, vocab=31, context=7, layers=4)
CLOSE = {"atol": 1e-10, "rtol": 0}
NAMES = [
    "tensor_parallel",
    "parallel",
    "spd",
    "desync(2)",
    "desync(3)",
    "desync(4)",
    "grouped(1)",
    "grouped(2)",
    "none",
]
NAMES += [
    "grouped(3)",
    "ladder",
    "delayed(1)",
    "delayed(3)",
    "selective(0,2)",
    gpt.Schedule("dropped", dropping(4, {1, 2, 6})),
]
# No row of the table has all of this: sums and means landing at once, and a sum that starts before its parts are read.
ODD = [(3, 6, True), (2, 4), (5, 6), (4, 6), (7, 8), (6, 6, True), (7, 8, True), (8, 8)]
ODD = gpt.Schedule("odd", tuple(gpt.Step(*each) for each in ODD))
EACH = [pytest.param(schedule, id=getattr(schedule, "name", schedule)) for schedule in (*NAMES, ODD)]


def drawn(schedule, tracks, config=CONFIG):
    """Whole weights of a size at which every one matters, biases and norms too."""
    torch.manual_seed(0)
    made = gpt.GPT(config, schedule, tracks).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return made


def batch(seed=0):
    tokens = torch.randint(CONFIG.vocab, (2, CONFIG.context + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def trained(model, steps=3):
    """Logits, then losses, first gradients and last parameters, whole: of AdamW's steps."""
    # The gradient of a key's bias is zero but for rounding, of which AdamW makes a step of lr * 1e-16 / 1e-8.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    with torch.no_grad():
        logits = model(batch()[0])
    losses, grads = [], None
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        model.sum_gradients()
        losses.append(loss.detach())
        grads = grads or model.gathered(lambda parameter: parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return logits, torch.stack(losses), grads, model.gathered()


def agree(schedule, ranks):
    whole = drawn(schedule, ranks)
    mine = local.run(ranks, lambda group: trained(gpt.GPT.of(whole, group)))
    right = trained(whole)
    for each in mine:
        torch.testing.assert_close(each, right, **CLOSE)


def held_to(logits_of, schedule, ranks):
    made = drawn(schedule, ranks)
    state = {name: parameter.detach().clone().requires_grad_() for name, parameter in made.named_parameters()}
    tokens, targets = batch()
    logits = logits_of(state, tokens, made.schedule, CONFIG.heads, ranks)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    right = logits.detach(), loss.detach()[None], {name: each.grad for name, each in state.items()}
    torch.testing.assert_close(trained(made, 1)[:3], right, **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", EACH)
def test_tracks_are_what_the_equation_says(name, ranks):
    held_to(truth.scheduled, name, ranks)


@pytest.mark.parametrize("tracks", [1, 4])
def test_tensor_parallelism_is_a_plain_gpt(tracks):
    held_to(oracle.plain, "tensor_parallel", tracks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EACH)
def test_ranks_are_the_tracks_after_three_steps(name, ranks):
    agree(name, ranks)


@pytest.mark.parametrize("name", ["spd", "delayed(3)"])
def test_eight_ranks_are_eight_tracks(name):
    agree(name, 8)


def in_processes(group):
    for schedule in (*NAMES, ODD):
        whole = drawn(schedule, group.world_size)
        torch.testing.assert_close(trained(gpt.GPT.of(whole, group)), trained(whole), **CLOSE)


def alike(group):
    """No step before gradients are summed; they are clipped and drawn as the tracks'; unequal weights are named."""
    whole = drawn("spd", 2)
    mine = gpt.GPT.of(whole, group)
    for each in (whole, mine):
        each(*batch()).backward()
    with pytest.raises(UnsupportedError, match=r"call the GPT's sum_gradients\(\) after the backward"):
        torch.optim.SGD(mine.parameters(), lr=0.1).step()
    with pytest.raises(UnsupportedError, match=r"call the GPT's sum_gradients\(\) after the backward"):
        clip_grad_norm_(mine, 0.5)
    mine.sum_gradients()
    mine.sum_gradients()  # nothing is left to add
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm_(mine, 0.5), norm)
    right = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(mine.gathered(lambda parameter: parameter.grad), right)
    with pytest.raises(UnsupportedError, match=r"zero them, or call sum_gradients\(\) once"):
        mine(*batch()).backward()
    with pytest.raises(UnsupportedError, match=r"one rank's part of a GPT's weight: save what gathered\(\) returns"):
        checkpoint.save("nowhere", mine)
    mine.zero_grad(set_to_none=False)
    for _ in range(2):  # accumulated
        mine(*batch()).backward()
    mine.sum_gradients()
    whole.zero_grad()
    (2 * whole(*batch())).backward()
    right = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(mine.gathered(lambda parameter: parameter.grad), right)
    torch.manual_seed(3)
    tracks = gpt.GPT(CONFIG, "ladder", 2)
    torch.manual_seed(3)
    shared = gpt.GPT(CONFIG, "ladder", group=group)
    torch.testing.assert_close(shared.gathered(), dict(tracks.state_dict()), atol=0, rtol=0)
    torch.testing.assert_close(shared(*batch()), tracks(*batch()))
    torch.manual_seed(group.rank)
    with pytest.raises(UnsupportedError, match=r"rank 1 was given another tokens\.weight"):
        gpt.GPT(CONFIG, "ladder", group=group)
    with pytest.raises(UnsupportedError, match="rank 1 was given another schedule than rank 0"):
        gpt.GPT.of(drawn(("spd", "none")[group.rank], 2), group)


@pytest.mark.long
def test_two_processes_are_two_tracks_by_every_schedule(pair):
    pair.call(in_process, in_processes, seconds=600)
    pair.call(in_process, alike, seconds=600)


@dataclass(frozen=True)
class Counted(local.LocalGroup):
    events: list[str] = field(default_factory=list)

    def all_reduce(self, x, *rest):
        self.events.append("sum")
        return super().all_reduce(x, *rest)

    def start_all_reduce(self, x):
        self.events.append("start")
        return Pending(super().all_reduce(x), finish=lambda y: self.events.append("wait") or y)


def events(group, name):
    """What one rank does in a forward, in its backward, and once a step."""
    group = Counted(group.rank, group.world_size, turns=group.turns)
    torch.manual_seed(0)  # every rank draws the same
    twelve = gpt.GPT(gpt.GPTConfig(width=4, heads=2, vocab=5, context=3), name, group=group)
    for sublayer in twelve.sublayers:
        sublayer.register_forward_hook(lambda *_: group.events.append("run"))
        sublayer.register_full_backward_hook(lambda *_: group.events.append("run"))
    group.events.clear()
    found, loss = [], twelve(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]))
    for act in (loss.backward, twelve.sum_gradients, list):
        found.append(group.events.copy())
        group.events.clear()
        act()
    return found


def between(events):
    """Sublayers that run from each start to its wait; the first that starts is the first that is awaited."""
    places = {kind: [at for at, event in enumerate(events) if event == kind] for kind in ("start", "wait")}
    return [events[start:wait].count("run") for start, wait in zip(*places.values(), strict=True)]


@pytest.mark.parametrize("name", SYNCS)
def test_syncs_are_counted_forward_and_backward_and_run_beside_what_the_schedule_says(name):
    forward, backward, once = local.run(2, lambda group: events(group, name))[1]
    syncs, overlapped = SYNCS[name]
    for each in (forward, backward):
        assert (each.count("sum") + each.count("start"), each.count("start")) == (syncs, overlapped)
    assert once == ["sum"]
    overlaps = [sync.overlap for sync in gpt.named(name, 12).syncs if sync.overlap]
    assert between(forward) == overlaps and between(backward) == overlaps[::-1]


@pytest.mark.long
def test_all_weights_are_the_same_for_every_schedule_and_each_ranks_part_of_each_has_a_gradient():
    w, h, layers = CONFIG.width, 4 * CONFIG.width, CONFIG.layers
    numbers = layers * (4 * w * w + 2 * w * h + 9 * w + h) + (CONFIG.vocab + CONFIG.context + 2) * w
    shapes = {path: parameter.shape for path, parameter in drawn("spd", 1).named_parameters()}
    for name in NAMES:
        made, parts = drawn(name, 4), 0
        assert {path: p.shape for path, p in made.named_parameters()} == shapes
        made(*batch()).backward()
        for path, parameter in made.named_parameters():
            parts += parameter.numel()
            grad = parameter.grad[:, None] if parameter.dim() == 1 else parameter.grad
            if "qkv" in path:  # [8 heads, q k v, size]; softmax does not see a bias that all keys share
                grad = grad.unflatten(0, (8, 3, -1))[:, slice(None) if "weight" in path else [0, 2]].flatten(0, 1)
            elif "up." in path or path.endswith("out.weight"):
                grad = (grad if "up." in path else grad.T).unflatten(0, (4, -1))
            assert grad.flatten(1).abs().amax(1).min() > 1e-6, f"{name}: {path}"
        assert parts == numbers


@pytest.mark.parametrize("name", ["tensor_parallel", "delayed(3)"])
def test_it_compiles_without_a_graph_break(name):
    whole = drawn(name, 2, replace(CONFIG, layers=2))
    right = trained(copy.deepcopy(whole), 1)
    whole.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(trained(whole, 1), right, **CLOSE)
    for length in (3, 5, 6):  # of any length, not of the first alone
        tokens = batch()[0][:, :1].expand(-1, length)
        torch.testing.assert_close(whole(tokens), whole.forward(tokens), **CLOSE)


def test_under_autocast_the_stream_stays_in_32_bits_and_sums_travel_in_16(monkeypatch):
    whole, read, added = drawn("grouped(2)", 2), streams.Streams.read, local._added
    right, (reads, sums) = whole(*batch()), (set(), set())
    monkeypatch.setattr(streams.Streams, "read", lambda self: reads.add((x := read(self)).dtype) or x)
    monkeypatch.setattr(local, "_added", lambda every: sums.add(every[0].dtype) or added(every))

    def half(group):
        with torch.autocast("cpu", torch.bfloat16):
            return gpt.GPT.of(whole.float(), group)(*batch()), whole(*batch())

    for found in local.run(2, half):
        torch.testing.assert_close(torch.stack(found).double(), right.expand(2), atol=0.02, rtol=0)
    assert (reads, sums) == ({torch.float32}, {torch.bfloat16})


def test_bad_shapes_and_parts_are_refused():
    config = lambda **changes: gpt.GPTConfig(**vars(CONFIG) | changes)  # noqa: E731
    for words, make in (
        ("width 16 does not divide by 3 heads", lambda: config(heads=3)),
        ("must be above 0", lambda: config(heads=0)),
        ("8 heads do not divide by 3 ranks", lambda: gpt.GPT(CONFIG, "spd", 3)),
        ("8 heads do not divide by 3 ranks", lambda: gpt.GPT(CONFIG, "spd", group=Group(0, 3))),
        ("do not divide by 0 ranks", lambda: gpt.GPT(CONFIG, "spd", 0)),
        ("do not divide by 2.0 ranks", lambda: gpt.GPT(CONFIG, "spd", 2.0)),
        ("schedule is a name, as 'spd', or a gpt.Schedule, not None", lambda: gpt.GPT(CONFIG, None)),
        ("2 tracks are computed on one device", lambda: gpt.GPT(CONFIG, "spd", 2, Group(0, 2))),
        ("schedule spd has 3 layers, not 4", lambda: gpt.GPT(CONFIG, gpt.named("spd", 3))),
        ("layer 4 is out of range: 0 to 3", lambda: gpt.GPT(CONFIG, "selective(4)")),
        ("2 tracks is shared by as many ranks, not by 4", lambda: gpt.GPT.of(drawn("spd", 2), Group(0, 4))),
        ("schedule spd has 3 layers, not 4", lambda: setattr(drawn("spd", 2), "schedule", gpt.named("spd", 3))),
        (
            r"targets are shaped as tokens, \[3, 2\], not \[2, 3\]",
            lambda: drawn("spd", 2)(*(torch.zeros(shape, dtype=torch.long) for shape in ((3, 2), (2, 3)))),
        ),
        (r"at most 7 positions\], not \[1, 8\]", lambda: drawn("spd", 2)(torch.zeros(1, 8, dtype=torch.long))),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_what_is_not_trained_of_a_whole_model_is_not_trained_of_its_shares():
    whole = drawn("spd", 2)
    whole.blocks[0]["mlp"].requires_grad_(False)
    for model in local.run(2, lambda group: gpt.GPT.of(whole, group)):
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in whole.parameters()]


@pytest.mark.parametrize("outer", ["", "inner."])
def test_whole_weights_load_into_a_ranks_share_as_its_own_do(outer):
    whole, others = drawn("spd", 2), gpt.GPT(CONFIG, "spd", 2).double()
    state = {outer + name: value for name, value in whole.state_dict().items()}

    def loaded(group):
        model = gpt.GPT.of(others, group)
        (torch.nn.ModuleDict({"inner": model}) if outer else model).load_state_dict(state)
        again = gpt.GPT.of(others, group)
        again.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.mlp\.up\.weight"):
            again.load_state_dict({"blocks.0.mlp.up.weight": torch.zeros(3)}, strict=False)
        return model.gathered(), again.gathered()

    for found in (one for both in local.run(2, loaded) for one in both):
        torch.testing.assert_close(found, dict(whole.named_parameters()), atol=0, rtol=0)
    assert {len(value) for name, value in state.items() if "up.weight" in name} == {4 * CONFIG.width}


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_hook_that_would_not_run_is_refused_as_are_gradients_that_are_not_there(kind):
    model = gpt.GPT(gpt.GPTConfig(width=4, heads=2, vocab=5, context=3, layers=1), "spd")
    with pytest.raises(UnsupportedError, match="hook its sublayer"):
        getattr(model.blocks[0]["mlp"].out, f"register_{kind}")(print)
    with pytest.raises(UnsupportedError, match=r"tokens\.weight has none of what is gathered, as gradients before a"):
        model.gathered(lambda parameter: parameter.grad)
