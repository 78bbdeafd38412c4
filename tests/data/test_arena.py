"""The tasks of the Long Range Arena: what is drawn follows the rules, what is read is what stands in the files."""

import json
import lzma
import random
import re
from collections import Counter

import pytest
import torch

from data_files import SHARED, cifar_parts, pack, shared
from longspan.data import images
from longspan_lab.data import arena
from longspan_lab.data.arena import listops, passages, pathfinder, reviews, sequences
from longspan_lab.data.arena.sequences import SPLITS

SIZES = {"listops": 40, "retrieval": 64, "pathfinder": 144}
SOURCES = {"listops": "made", "retrieval": "", "pathfinder": "made"}
DRAWN = [*SIZES]


@pytest.fixture(autouse=True, scope="module")
def documents(tmp_path_factory):
    """A folder of letters, for the passages."""
    folder, dice = tmp_path_factory.mktemp("documents"), random.Random(0)
    for i in range(60):
        (folder / f"{i}.txt").write_text("".join(dice.choices("abcdefgh ", k=300)), encoding="utf-8")
    SOURCES["retrieval"] = f"text:{folder}"


def drawn(task: str, seed: int = 0, length: int = 0, examples: int = 24, tests: int = 10) -> arena.Arena:
    return arena.load(task, SOURCES[task], length or SIZES[task], examples, tests, seed)


def contents(task: arena.Arena, split: str) -> list[bytes]:
    return [row.numpy().tobytes() for row in task.splits[split].tokens]


class TestEvery:
    @pytest.mark.parametrize("task", DRAWN)
    def test_examples_are_a_function_of_the_seed(self, task):
        arena.load.cache_clear()
        first, again, other = drawn(task), None, drawn(task, 1)
        arena.load.cache_clear()
        again = drawn(task)
        assert first.checksum == again.checksum != other.checksum
        assert [first.count(split) for split in SPLITS] == [24, 10, 10]

    @pytest.mark.parametrize("task", DRAWN)
    def test_no_test_is_among_what_is_learned(self, task):
        found = drawn(task)
        assert not set(contents(found, "train")) & {*contents(found, "validation"), *contents(found, "test")}

    @pytest.mark.parametrize("task", ["retrieval", "pathfinder"])
    def test_two_classes_are_equally_frequent(self, task):
        assert all(drawn(task).majority(split) == 0.5 for split in SPLITS)

    def test_a_batch_is_padded_to_its_longest(self):
        rows = sequences.rows([((b"abc",), 1), ((b"a",), 0), ((b"abcdefgh",), 1)], 5)
        task = sequences.arena("letters", 256, 5, 2, dict.fromkeys(SPLITS, rows))
        batch = task.take("train", torch.tensor([1, 0]))
        assert batch.tokens.tolist() == [[[97, 0, 0]], [[97, 98, 99]]]
        assert batch.mask is not None
        assert batch.mask.tolist() == [[[True, False, False]], [[True, True, True]]]
        assert batch.labels.tolist() == [0, 1]
        # What is longer is cut, and without padding there is no mask.
        whole = task.take("test", torch.tensor([2]))
        assert bytes(whole.tokens[0, 0].tolist()) == b"abcde"
        assert whole.mask is None
        assert task.majority("test") == pytest.approx(2 / 3)

    def test_the_checksum_tells_of_labels_too(self):
        one, other = (sequences.rows([((b"a",), label)], 2) for label in (0, 1))
        kinds = [sequences.arena("a", 256, 2, 2, dict.fromkeys(SPLITS, rows)).checksum for rows in (one, other)]
        assert kinds[0] != kinds[1]

    def test_the_first_of_each_class_in_turn(self):
        labels = torch.tensor([0, 0, 0, 1, 2, 1])
        assert sequences.balanced(labels, 4).tolist() == [0, 1, 3, 4]
        assert sequences.balanced(labels, 99).tolist() == [0, 1, 2, 3, 4, 5]


def value(symbols: list[str]) -> int:
    """By recursion, and not by a stack as the evaluator."""
    first = symbols.pop(0)
    if first.isdigit():
        return int(first)
    values = []
    while symbols[0] != "]":
        values.append(value(symbols))
    symbols.pop(0)
    values.sort()
    middle = len(values) // 2
    median = values[middle] if len(values) % 2 else int((values[middle - 1] + values[middle]) / 2)
    return {"[MIN": values[0], "[MAX": values[-1], "[MED": median, "[SM": sum(values) % 10}[first]


class TestListOps:
    def test_by_hand(self):
        known = {"[MAX 2 9 [MIN 4 7 ] 0 ]": 9, "[MED 1 8 2 4 ]": 3, "[MED 1 8 2 5 ]": 3, "[SM 9 8 [MIN 7 5 ] ]": 2}
        for text, expected in (known | {"7": 7}).items():
            assert listops.evaluate(text.split()) == expected

    @pytest.mark.parametrize("text", ["[MAX 2 9", "2 ]", "[MAX ]", "2 9", "", "[MAX 2 x ]", "[MIN 12 3 ]"])
    def test_what_is_no_expression_is_refused(self, text):
        with pytest.raises(ValueError, match="expression"):
            listops.evaluate(text.split())

    def test_labels_are_values_and_lengths_in_their_range(self):
        task = drawn("listops", length=60, examples=200)
        part = task.splits["train"]
        for tokens, length, label in zip(part.tokens[:, 0], part.lengths[:, 0], part.labels, strict=True):
            assert 15 <= length <= 60
            symbols = [listops.SYMBOLS[i] for i in tokens[:length]]
            assert value(symbols) == label
            assert not symbols

    def test_no_expression_comes_twice(self):
        # So short that most would.
        task = drawn("listops", length=8, examples=300, tests=100)
        assert len({one for split in SPLITS for one in contents(task, split)}) == 500

    def test_trees_are_drawn_by_the_published_rules(self):
        """Nodes have 2 to 10 children and one of four operators, equally often; one child in four is a node."""
        dice, children, operators, nodes, depths = random.Random(0), Counter(), Counter(), [0, 0], set()
        for _ in range(300):
            open_ = []
            # Enough tokens that no tree is left out.
            for symbol in listops.tree(dice, 10**6):
                if symbol == "]":
                    operator, count = open_.pop()
                    children[count] += 1
                    operators[operator] += 1
                    continue
                if open_:
                    open_[-1][1] += 1
                    nodes[symbol in listops.OPERATORS] += len(open_) < 9
                if symbol in listops.OPERATORS:
                    open_.append([symbol, 0])
                    depths.add(len(open_))
        assert set(children) == set(range(2, 11))
        assert max(depths) == 9
        total = sum(operators.values())
        # Four standard errors.
        assert all(abs(n / total - 1 / 4) < 4 * (3 / 16 / total) ** 0.5 for n in operators.values())
        assert all(abs(n / total - 1 / 9) < 4 * (8 / 81 / total) ** 0.5 for n in children.values())
        assert abs(nodes[1] / sum(nodes) - 1 / 4) < 4 * (3 / 16 / sum(nodes)) ** 0.5

    def test_both_layouts_are_read(self):
        lra = "( ( ( [MAX 2 ) 9 ) ] )\t9"
        assert listops.parse(lra + "\r\n", "here") == ("[MAX 2 9 ]".split(), 9)
        assert listops.parse("9\t( ( ( [MAX 2 ) 9 ) ] )\n", "here") == ("[MAX 2 9 ]".split(), 9)
        assert listops.parse("Source\tTarget\r\n", "here") is None
        for line, said in (("[MAX 2 ]", "here: expected"), ("[MAX 2 ]\t[MAX", "expected"), ("[MAP 2 ]\t2", "MAP")):
            with pytest.raises(ValueError, match=said):
                listops.parse(line, "here")

    def test_a_folder_of_files(self, tmp_path):
        lines = ["Source\tTarget", "( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [MIN 2 ) 9 ) ] )\t2"]
        for part in ("train", "val", "test"):
            (tmp_path / f"basic_{part}.tsv").write_text("\r\n".join(lines), encoding="utf-8")
        (tmp_path / "other_test.tsv").write_text("", encoding="utf-8")
        task = arena.load("listops", f"listops:{tmp_path}", 8, 1, 2)
        assert [task.count(split) for split in SPLITS] == [1, 2, 2]
        assert [listops.SYMBOLS[i] for i in task.take("test", torch.tensor([1])).tokens[0, 0]] == "[MIN 2 9 ]".split()
        assert task.take("test", torch.tensor([0, 1])).labels.tolist() == [9, 2]
        for part in ("train", "val"):
            (tmp_path / f"other_{part}.tsv").write_text("", encoding="utf-8")
        with pytest.raises(ValueError, match="it has basic, other"):
            arena.load("listops", f"listops:{tmp_path}", 9, 1, 2)

    @pytest.mark.skipif(not (SHARED / "listops").exists(), reason="no ListOps files next to the repository")
    @pytest.mark.parametrize("name", ["listops_d20s_test.tsv.gz", "lra_rules_val.tsv.gz"])
    def test_every_label_of_the_files_is_what_we_compute(self, name):
        count = 0
        for symbols, label in listops.lines(shared("listops") / name):
            assert listops.evaluate(symbols) == label
            count += 1
        assert count == {"listops_d20s_test.tsv.gz": 10_000, "lra_rules_val.tsv.gz": 500}[name]


def reached(picture: torch.Tensor) -> set[tuple[int, int]]:
    """The lit pixels that are reached from a disc by steps of two at most, one after the other."""
    lit = {tuple(at) for at in picture.nonzero().tolist()}
    todo = [tuple((picture == pathfinder.DISC).nonzero()[0].tolist())]
    found = set(todo)
    while todo:
        row, column = todo.pop()
        near = {(row + i, column + j) for i in range(-2, 3) for j in range(-2, 3)} & lit - found
        found |= near
        todo += near
    return found


class TestPathfinder:
    @pytest.mark.parametrize("length", [144, 1024])
    def test_discs_are_connected_exactly_in_the_class_of_connected_discs(self, length):
        task = drawn("pathfinder", length=length, examples=40)
        size, labels = task.grid[0], task.splits["train"].labels
        for picture, label in zip(task.splits["train"].tokens.view(-1, size, size), labels, strict=True):
            discs = {tuple(at) for at in (picture == pathfinder.DISC).nonzero().tolist()}
            assert len(discs) == 10
            assert (discs <= reached(picture)) == bool(label)

    def test_the_distance_of_the_discs_tells_nothing(self):
        pictures, labels = pathfinder.draw(64, 16, torch.Generator().manual_seed(3))
        assert labels.tolist() == [1, 0] * 32
        # The corner of both discs' pixels farthest apart, which is as far as the discs are.
        spans = [(picture == pathfinder.DISC).nonzero().double() for picture in pictures]
        apart = [torch.cdist(span, span).max().item() for span in spans]
        assert sum(apart[::2]) == pytest.approx(sum(apart[1::2]), rel=0.05)

    def test_dashes_and_levels(self):
        pictures, _ = pathfinder.draw(32, 16, torch.Generator().manual_seed(0))
        assert pictures.unique().tolist() == [0, pathfinder.PATH, pathfinder.DISC]
        # Two paths of 12 pixels and a distractor of 4, of which two in three are lit, and two discs of five.
        lit = (pictures > 0).flatten(1).sum(1)
        assert 18 <= lit.min()
        assert lit.max() <= 30


class TestRetrieval:
    def test_documents_are_in_one_split_and_passages_do_not_overlap(self, tmp_path):
        # Every byte tells its document, every pair of bytes its place there.
        for i in range(60):
            text = bytes([33 + i]) + b"".join(bytes([33 + i, 33 + j]) for j in range(60))
            (tmp_path / f"{i:02}.txt").write_bytes(text)
        task = arena.load("retrieval", f"text:{tmp_path}", 20, 200, 60)
        owners = {}
        for split in SPLITS:
            part = task.splits[split]
            for (one, other), label in zip(part.tokens.tolist(), part.labels.tolist(), strict=True):
                sources = [Counter(passage).most_common(1)[0][0] for passage in (one, other)]
                assert (sources[0] == sources[1]) == bool(label)
                owners.setdefault(split, set()).update(sources)
                if label:
                    places = [{b for b in passage if b != sources[0]} for passage in (one, other)]
                    assert len(places[0] & places[1]) <= 1
        assert not owners["train"] & owners["test"]
        assert not owners["train"] & owners["validation"]
        assert not owners["validation"] & owners["test"]

    def test_too_few_documents(self, tmp_path):
        (tmp_path / "a.txt").write_text("a" * 100, encoding="utf-8")
        with pytest.raises(ValueError, match="has [01] documents of 40 bytes or more for train; it needs two"):
            arena.load("retrieval", f"text:{tmp_path}", 20, 4, 4)

    def test_the_split_is_that_of_the_content(self):
        shares = Counter(passages.split_of(bytes([i, j])) for i in range(40) for j in range(25))
        assert shares["train"] > 700
        assert min(shares["validation"], shares["test"]) > 60


def packed_reviews() -> dict[str, bytes]:
    return {
        f"aclImdb/{part}/{name}/{i}_{rating}.txt": f"{part} {name} {i}".encode()
        for part in ("train", "test")
        for name, rating in (("pos", 9), ("neg", 2))
        for i in range(40)
    }


class TestReviews:
    def folder(self, root, kind):
        if kind == "archive":
            pack(root / reviews.ARCHIVE, packed_reviews())
            return
        for name, content in packed_reviews().items():
            if kind == "files":
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
        if kind == "lines":
            for part in ("train", "test"):
                rows = [
                    json.dumps({"id": name, "label": int("/pos/" in name), "text": content.decode()})
                    for name, content in sorted(packed_reviews().items())
                    if f"/{part}/" in name
                ]
                (root / f"imdb_{part}_80.jsonl.xz").write_bytes(lzma.compress("\n".join(rows).encode()))

    @pytest.mark.parametrize("kind", ["archive", "files", "lines"])
    def test_every_layout_has_the_same_reviews(self, tmp_path, kind):
        self.folder(tmp_path, kind)
        task = arena.load("text", f"imdb:{tmp_path}", 32, 60, 50)
        assert [task.count(split) for split in SPLITS] == [60, 4, 50]
        assert all(task.majority(split) == 0.5 for split in SPLITS)
        for split in SPLITS:
            batch = task.take(split, torch.arange(task.count(split)))
            for tokens, label in zip(batch.tokens[:, 0], batch.labels, strict=True):
                part, name, _ = bytes(tokens.tolist()).rstrip(b"\0").decode().split()
                assert part == ("test" if split == "test" else "train")
                assert name == ("pos" if label else "neg")

    def test_the_download_is_checked(self, tmp_path, monkeypatch):
        """With what the address delivers in its place, the sha256 being that of another file."""
        pytest.importorskip("pooch", reason="downloads: pip install longspan[data]")
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
        pack(tmp_path / reviews.ARCHIVE, packed_reviews())
        address = (tmp_path / reviews.ARCHIVE).as_uri()
        monkeypatch.setattr(reviews, "URL", address)
        with pytest.raises(ValueError, match=f"cannot download {reviews.ARCHIVE} .sha256 {reviews.SHA256}"):
            reviews.load("imdb", 8, 4, 4, 0)

    def test_what_is_damaged_is_refused(self, tmp_path):
        self.folder(tmp_path, "archive")
        archive = tmp_path / reviews.ARCHIVE
        archive.write_bytes(archive.read_bytes()[:300])
        with pytest.raises(ValueError, match="truncated or corrupt"):
            reviews.load(f"imdb:{tmp_path}", 8, 4, 4, 0)
        (tmp_path / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
        with pytest.raises(ValueError, match="line 1 of .*must be"):
            reviews.load(f"imdb:{tmp_path}", 8, 4, 4, 0)
        (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 2}\n', encoding="utf-8")
        with pytest.raises(ValueError, match="a label 0 or 1, not 2"):
            reviews.load(f"imdb:{tmp_path}", 8, 4, 4, 0)


class TestImages:
    def test_the_digits_are_scikit_learns(self):
        pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install longspan[train]")
        task, whole = arena.load("image", "digits", 1, 10**6, 100), images.digits()
        assert (task.vocab, task.length, task.grid, task.classes) == (17, 64, (8, 8), 10)
        assert torch.equal(task.splits["train"].tokens[:, 0], whole.splits["train"])
        assert torch.equal(task.splits["train"].labels, whole.labels["train"])
        few = task.splits["test"]
        assert len(few.labels) == 100
        assert few.labels.bincount().tolist() == [10] * 10

    def test_colors_become_grey(self, tmp_path):
        for name, content in cifar_parts().items():
            (tmp_path / name).write_bytes(content)
        task = arena.load("image", f"cifar10:{tmp_path}", 1, 100, 100)
        whole = images.cifar10(str(tmp_path))
        colors = whole.picture(whole.splits["train"][:1].long())[0].double()
        weighed = (colors * torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)).sum(-1)
        found = task.splits["train"].tokens[0, 0].view(32, 32).double()
        assert task.length == 1024
        assert (found - weighed).abs().max() <= 0.5 + 1e-4


MISTAKES = {
    ("listops", "mad", 9): "listops:FOLDER",
    ("listops", "made", 7): "length=7 of listops must be at least 8",
    ("listops", "listops:nowhere", 9): "there is no such folder",
    ("text", "imbd", 9): "imdb:FOLDER",
    ("text", "imdb:nowhere", 9): "there is no such folder",
    ("image", "cifar", 9): "unknown data set of images 'cifar'",
    ("retrieval", "stdlib", 9): "retrieval=stdlib: ",
    ("pathfinder", "files", 144): "pathfinder=files: ",
    ("pathfinder", "made", 255): "length=255 of pathfinder must be a square of 12",
    ("pathfinder", "made", 100): "length=100 of pathfinder must be a square of 12",
    ("listop", "made", 9): "unknown task 'listop' (did you mean 'listops'?)",
    ("listops", "made", 0): "length=0 of listops must be at least 1",
}


@pytest.mark.parametrize("asked", MISTAKES)
def test_mistakes_say_what_would_be_right(asked):
    with pytest.raises(ValueError, match=re.escape(MISTAKES[asked])):
        arena.load(*asked, 4, 4)
