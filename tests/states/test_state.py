"""States as values, and their files: what was written comes back, and what cannot be continued is refused by name."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

import longspan
from longspan.attention.average import AverageState as Average
from longspan.states import utils as states
from longspan.states.kv_cache import KeyValues

SPECS = ["linear", "linear(rotary=10.0)", "softmax", "kernel"]


@pytest.mark.parametrize("spec", SPECS)
def test_copies_share_no_memory(spec):
    _, state = started(spec)
    for copy in (longspan.states.clone(state), longspan.states.select(state, [0, 1, 2])):
        for a, b in zip(pytree.tree_leaves(copy), pytree.tree_leaves(state), strict=True):
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()


def test_detach_cuts_the_graph():
    _, state = started("linear")
    assert state.sums.requires_grad
    assert not longspan.states.detach(state).sums.requires_grad


def test_select_repeats_and_reorders():
    _, state = started("linear")
    picked = longspan.states.select(state, torch.tensor([2, 0, 2, 1]))
    assert torch.equal(picked.sums, state.sums[[2, 0, 2, 1]])
    with pytest.raises(IndexError):
        longspan.states.select(state, [3])


def test_nbytes_counts_every_tensor():
    module = longspan.build("softmax", 8, 2)
    # keys and values of 2 heads x 7 slots x 4 channels x 4 bytes, and one int64 length
    assert longspan.states.nbytes(module.init_state(1, 7)) == 2 * 2 * 7 * 4 * 4 + 8
    assert longspan.states.nbytes(longspan.build("linear", 8, 2).init_state(1)) == 2 * 4 * 5 * 4


class TestErrors:
    def test_of_another_mechanism(self, tmp_path):
        _, state = started("linear")
        longspan.states.save(state, tmp_path / "s")
        with pytest.raises(ValueError, match="does not hold the state of this mechanism or stack"):
            longspan.states.load(tmp_path / "s", started("softmax")[1])

    def test_damaged(self, tmp_path):
        (tmp_path / "s").write_bytes(b"no state")
        with pytest.raises(ValueError, match="is not a readable state file"):
            longspan.states.load(tmp_path / "s", started("linear")[1])


def test_a_state_made_with_other_options_is_refused_in_words():
    plain, gated = (longspan.build(spec, 8, 2) for spec in ("rfa", "rfa(gate=True)"))
    x = torch.randn(1, 1, 8)
    for own, other in ((plain, gated), (gated, plain)):
        with pytest.raises(ValueError, match=r"rfa cannot continue|state has a tensor of shape"):
            own(x, other.init_state(1))


def started(spec, rows=3, tokens=5):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = longspan.build(spec, 8, 2)
        return module, module(torch.randn(rows, tokens, 8), module.init_state(rows))[1]


def written(path, state, **leaves):
    """``state`` in a file, with other leaves under some names (without ``state.``), and a digest that fits them."""
    changed = states.named(state) | {f"state.{name}": leaf for name, leaf in leaves.items()}
    metadata = {"longspan": "state", "tree": states._shape(state), "sha256": states._digest(changed)}
    save_file(changed, path, metadata=metadata)
    return path


@pytest.mark.parametrize("name", longspan.list_mechanisms())
def test_every_state_comes_back_whatever_its_rows_and_tokens(name, tmp_path):
    for spec in longspan.mechanism_examples(name):
        try:
            module = longspan.build(spec, 8, 2)
            state = module.init_state(3)
        except ValueError:
            continue  # sees whole sequences only
        with torch.no_grad():
            _, state = module(torch.randn(3, 7, 8), state)
        longspan.states.save(state, tmp_path / "s")
        for like in (module.init_state(1), module.init_state(2, capacity=11), longspan.states.select(state, [0])):
            loaded = longspan.states.load(tmp_path / "s", like)
            assert type(loaded) is type(state)
            for a, b in zip(pytree.tree_leaves(loaded), pytree.tree_leaves(state), strict=True):
                assert torch.equal(a, b)


def test_texts_are_kept_with_a_state(tmp_path):
    module, state = started("linear")
    path, given = tmp_path / "s", {"model": "abc", "created": "7"}
    longspan.states.save(state, path, given)
    assert longspan.states.read_metadata(path) == given
    assert torch.equal(longspan.states.load(path, module.init_state(1)).sums, state.sums)
    path.write_bytes(path.read_bytes().replace(b'"abc"', b'"abd"'))
    with pytest.raises(ValueError, match=r"changed or damaged"):
        longspan.states.load(path, module.init_state(1))
    with pytest.raises(ValueError, match=r"'sha256', which the format of the file uses"):
        longspan.states.save(state, path, {"sha256": ""})
    with pytest.raises(ValueError, match=r"no state file"):
        longspan.states.read_metadata(tmp_path / "other")


def test_a_context_may_have_other_tokens(tmp_path):
    module = longspan.build("softmax", 8, 2)
    (_, state), (_, other) = (module(torch.randn(2, 1, 8), context=torch.randn(2, n, 8)) for n in (5, 9))
    longspan.states.save(state, tmp_path / "s")
    assert torch.equal(longspan.states.load(tmp_path / "s", other).keys, state.keys)


KEYS = torch.zeros(3, 2, 5, 4)


class TestRefused:
    @pytest.mark.parametrize(
        ("leaf", "message"),
        [
            ({"length": torch.full((3,), -(10**6))}, r"state.length is -1000000"),
            ({"length": torch.tensor([1, 5, 6])}, r"state.length is 6, .* 5 slots"),
            ({"length": torch.full((3,), 5, dtype=torch.int32)}, r"state.length is torch.int32 .3,."),
            ({"length": torch.full((3,), 5.0)}, r"state.length is torch.float32 .3,.* torch.int64"),
            ({"length": torch.full((3, 1), 5)}, r"state.length is torch.int64 .3, 1.* torch.int64 .0,."),
            ({"length": torch.full((2,), 5)}, r"state.length has 2 rows, .*state.keys has 3"),
            ({"keys": KEYS.double()}, r"state.keys is torch.float64 .3, 2, 5, 4.* torch.float32 .0, 2, 0, 4."),
            ({"keys": KEYS[..., :3].clone()}, r"state.keys is torch.float32 .3, 2, 5, 3."),
            ({"keys": KEYS[:, :1].clone()}, r"state.keys is torch.float32 .3, 1, 5, 4."),
            ({"keys": KEYS[:, :, :4].clone()}, r"state has unequal numbers of tokens: .'keys': 4, 'values': 5"),
            ({"keys": KEYS[0]}, r"state.keys is torch.float32 .2, 5, 4."),
        ],
    )
    def test_what_cannot_be_continued(self, tmp_path, leaf, message):
        module, state = started("softmax")
        path = written(tmp_path / "s", longspan.states.detach(state), **leaf)
        with pytest.raises(ValueError, match=rf"'{path}' cannot be continued: {message}"):
            longspan.states.load(path, module.init_state(0))

    def test_a_position_before_the_first(self, tmp_path):
        for spec in ("linear(rotary=10.0)", "retention", "local(window=3)"):
            module, state = started(spec)
            path = written(tmp_path / "s", longspan.states.detach(state), position=torch.tensor([4, -1, 4]))
            with pytest.raises(ValueError, match=r"state.position is -1"):
                longspan.states.load(path, module.init_state(3))

    def test_another_size_of_what_does_not_grow(self, tmp_path):
        _, state = started("local(window=3)")
        longspan.states.save(state, tmp_path / "s")
        with pytest.raises(ValueError, match=r"state.keys is .* this mechanism or stack has"):
            longspan.states.load(tmp_path / "s", started("local(window=4)")[1])

    def test_a_changed_bit(self, tmp_path):
        module, state = started("linear")
        path = tmp_path / "s"
        longspan.states.save(state, path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"'{path}' was changed or damaged"):
            longspan.states.load(path, module.init_state(3))

    def test_a_file_without_a_digest(self, tmp_path):
        module, state = started("linear")
        leaves = states.named(longspan.states.detach(state))
        save_file(leaves, tmp_path / "s", metadata={"tree": states._shape(state)})
        with pytest.raises(ValueError, match=r"changed or damaged .* None"):
            longspan.states.load(tmp_path / "s", module.init_state(3))

    def test_tensors_without_values(self, tmp_path):
        _, state = started("linear")
        longspan.states.save(state, tmp_path / "s")
        nowhere = pytree.tree_map(lambda leaf: leaf.to("meta"), state)
        with pytest.raises(ValueError, match=r"state.sums is on the meta device"):
            longspan.states.load(tmp_path / "s", nowhere)
        with pytest.raises(ValueError, match=r"state.sums is on the meta device"):
            longspan.states.save(nowhere, tmp_path / "s")

    def test_a_path_that_no_file_can_have(self, tmp_path):
        module, state = started("linear")
        with pytest.raises(ValueError, match=r"a\\x00'.*NUL"):
            longspan.states.save(state, f"{tmp_path}/a\0")
        with pytest.raises(ValueError, match=r"a\\x00'.*NUL"):
            longspan.states.load(f"{tmp_path}/a\0", module.init_state(3))
        with pytest.raises(ValueError, match=rf"'{tmp_path}' is not a readable state file"):
            longspan.states.load(tmp_path, module.init_state(3))

    def test_a_full_disk_leaves_the_older_file(self, tmp_path, monkeypatch):
        module, state = started("linear")
        longspan.states.save(state, tmp_path / "s")

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(ValueError, match=rf"cannot write a state to '{tmp_path}/s': No space left on device"):
                longspan.states.save(longspan.states.select(state, [0]), tmp_path / "s")
        assert len(longspan.states.load(tmp_path / "s", module.init_state(1)).sums) == 3
        assert os.listdir(tmp_path) == ["s"]


class TestValues:
    def test_of_a_stack(self):
        good = KeyValues(KEYS, KEYS, torch.tensor([0, 5, 3]))
        for state in (good, (good, (good,)), torch.ones(2)):
            states.check_values(state)
        with pytest.raises(ValueError, match=r"state.1.0.length is 6, .* 5 slots"):
            states.check_values((good, (good._replace(length=torch.tensor([6])),)))

    def test_counters_of_any_name(self):
        with pytest.raises(ValueError, match=r"state.count is torch.int8; .* torch.int64"):
            states.check_values(Average(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int8)))
        with pytest.raises(ValueError, match=r"state.count is -3"):
            states.check_values(Average(torch.zeros(1, 2), torch.tensor([-3])))
        states.check_values(Average(torch.zeros(1, 2), torch.zeros(1)))
        states.check_values(Average(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)))

    def test_without_values(self):
        with pytest.raises(ValueError, match=r"state is on the meta device"):
            states.check_values(torch.zeros(2, device="meta"))


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path, monkeypatch):
    module, state = started("linear", rows=2)
    longspan.states.save(state, tmp_path / "s")
    opened = states.atomic_io.open_regular

    def open_and_replace(path):
        file = opened(path)
        longspan.states.save(module.init_state(1), path)
        return file

    monkeypatch.setattr(states.atomic_io, "open_regular", open_and_replace)
    assert torch.equal(longspan.states.load(tmp_path / "s", module.init_state(1)).sums, state.sums)


def test_threads_that_write_one_file_leave_one_whole_state(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    module, state = started("linear", rows=2)
    ones = pytree.tree_map(torch.ones_like, longspan.states.detach(state))
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda k: longspan.states.save(pytree.tree_map(lambda t: t * k, ones), tmp_path / "s"), range(40))
        )
    assert len(longspan.states.load(tmp_path / "s", module.init_state(1)).sums.unique()) == 1
    assert os.listdir(tmp_path) == ["s"]
    with safe_open(tmp_path / "s", "pt") as file:
        assert len(file.metadata()["sha256"]) == 64
