"""The Long Range Arena: every mechanism classifies long sequences, in one configuration; accuracy and cost."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from longspan._utils import spec
from longspan.attention import REGISTRY, build
from longspan.data.order import batch_indices
from longspan.models.config import StackConfig

from ..bench.candidates import Refused
from ..data import arena
from ..data.arena import Arena
from . import lra_published, lra_report
from .experiment import DEVICES, Buildable, Experiment, Place, Row, at_least, check_device, generator, setting
from .learning import Learning, learn, parameters, slug
from .lra_cost import cost
from .lra_models import ALL, Classifier, Shape, both, mechanisms, shape, sized

FEW = ("softmax", "linear")
LOOK = 256  # validation examples per evaluation


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    specs: str = setting(
        ALL,
        "attentions, separated by semicolons; a bare name gets fitting sizes; all: every mechanism",
        quick="softmax; linformer; retention",
    )
    tasks: tuple[str, ...] = setting(
        ("listops", "image"), "tasks for all of these", gpu=("listops", "text", "retrieval", "image", "pathfinder")
    )
    few: str = setting("; ".join(FEW), "attentions that also train on the other tasks", quick="softmax")
    more: tuple[str, ...] = setting(
        ("text", "retrieval", "pathfinder"),
        "tasks for these attentions only; none: no further tasks",
        quick=("retrieval", "pathfinder"),
        gpu=(lra_report.NONE,),
    )
    listops: str = setting("made", "made (generated), or listops:FOLDER of TSV files")
    image: str = setting("digits", "digits, mnist or cifar10 (the latter two also with :FOLDER)", gpu="cifar10")
    text: str = setting("imdb", "imdb (a download), or imdb:FOLDER")
    retrieval: str = setting("text:stdlib", "text of many documents: text:stdlib or text:FOLDER")
    pathfinder: str = setting("made", "made: generated from the seed")
    listops_length: int = setting(
        128, "maximum tokens of an expression; the shortest have a quarter", quick=16, gpu=2000
    )
    text_length: int = setting(1024, "bytes of a review, from its start", gpu=4000)
    retrieval_length: int = setting(256, "bytes of a passage", quick=32, gpu=4000)
    pathfinder_length: int = setting(256, "pixels of an image, a square number", quick=144, gpu=1024)
    listops_steps: int = setting(200, "number of updates", quick=2, gpu=2000, paper=5000)
    image_steps: int = setting(250, "number of updates", quick=2, gpu=2000, paper=35000)
    text_steps: int = setting(800, "number of updates", gpu=2000, paper=20000)
    retrieval_steps: int = setting(200, "number of updates", quick=2, gpu=2000, paper=5000)
    pathfinder_steps: int = setting(300, "number of updates", quick=2, gpu=4000, paper=62400)
    examples: int = setting(10000, "maximum number of training examples", least=1, quick=12, gpu=20000, paper=160000)
    tests: int = setting(
        1000, "maximum number of test examples, and of validation examples", least=1, quick=6, gpu=2000, paper=20000
    )
    dim: int = setting(64, "width of the models", least=1, quick=8, gpu=128, paper=256)
    depth: int = setting(2, "number of blocks", least=1, quick=1, gpu=4)
    heads: int = setting(2, "heads of each attention", least=1, gpu=4)
    feedforward: int = setting(128, "inner width of the feed-forward networks", least=1, quick=8, gpu=512, paper=1024)
    batch: int = setting(16, "examples per update", least=1, quick=4, gpu=32)
    rate: float = setting(
        2e-3, "peak learning rate; a warm-up of a tenth, then a cosine schedule", positive=True, gpu=1e-3
    )
    cost_length: int = setting(
        2048, "tokens per sequence for the measurement of time and memory", least=1, quick=32, gpu=4000
    )
    cost_batch: int = setting(1, "batch size of that measurement", least=1, gpu=32)
    rounds: int = setting(5, "timing samples of that measurement", least=1, quick=1)
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda")
    seed: int = setting(0, "seed of weights, order of the examples and generated data", least=0)

    def __post_init__(self):
        super().__post_init__()
        for task in (*self.tasks, *self.more):
            if task != lra_report.NONE:
                spec.known(task, arena.TASKS, "task")
                at_least(1, **{f"{task}_steps": self.steps(task)})
        if twice := set(self.tasks) & set(self.more):
            raise ValueError(f"more={','.join(self.more)}: {min(twice)} is a task of all attentions already")
        StackConfig(dim=self.dim, depth=self.depth, heads=self.heads, feedforward=self.feedforward)

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for text in (*spec.split(self.few), *(() if self.specs == ALL else spec.split(self.specs))):
            if text not in REGISTRY:
                build(text, self.dim, self.heads, causal=not both(text))

    def steps(self, task: str) -> int:
        """Updates of a training on a task."""
        return getattr(self, f"{task}_steps")

    def load(self, task: str) -> Arena:
        """A task's examples. Raises ValueError, see ``arena.load``."""
        # The length of an image is fixed.
        length = 1 if task == "image" else getattr(self, f"{task}_length")
        return arena.load(task, getattr(self, task), length, self.examples, self.tests, self.seed)

    def own_tasks(self) -> list[str]:
        """All tasks in training order."""
        return [task for task in (*self.tasks, *self.more) if task != lra_report.NONE]

    def cost_shape(self, text: str) -> Shape:
        """The classifier of bytes whose steps are timed."""
        own = self.dim, self.depth, self.heads, self.feedforward
        return Shape(sized(text, self.cost_length), *own, 256, self.cost_length, 1, 2)


def points(settings: Settings) -> list[Row]:
    """Every training, task by task; then the cost of a step, which needs a quiet machine.

    Raises ValueError if the requested GPU is missing.
    """
    check_device(settings.device)
    every, few = mechanisms(settings.specs), spec.split(settings.few)
    found = [
        {"what": "training", "task": task, "mechanism": name}
        for task in settings.own_tasks()
        for name in (every if task in settings.tasks else few)
    ]
    return [*found, *({"what": "cost", "mechanism": name} for name in dict.fromkeys((*every, *few)))]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training, possibly resumed, and its test; or the cost of a step, see ``cost``.

    A training -> ``spec`` that was built; ``accuracy`` on the test set, of which ``majority`` is the share of its most
    frequent class and ``tests`` the size; ``parameters``; ``curve``: rows of ``step`` and ``accuracy`` on validation
    examples. An unmeasurable cost -> ``refused``: why.
    """
    name = point["mechanism"]
    if point["what"] == "cost":
        one = settings.cost_shape(name)
        try:
            return {"spec": one.spec, **cost(one, settings.cost_batch, settings.device, settings.rounds, place.track)}
        except Refused as error:
            return {"spec": one.spec, "refused": str(error)}
    task, steps = settings.load(point["task"]), settings.steps(point["task"])
    one = shape(settings, name, task)
    seed = generator(settings.seed, "weights").initial_seed()
    model = Classifier(one, seed).to(settings.device).train()
    tell = partial(model.accuracy, task, batch=settings.batch, device=settings.device)

    def loss(model: Classifier, step: int) -> Tensor:
        # Statistics of the previous step; with the call in ``look``, one update per step.
        model.update()
        chosen = batch_indices(task.count("train"), settings.seed, step, settings.batch)
        return model.loss(task.take("train", chosen).to(settings.device))

    def look(model: Classifier) -> Row:
        model.update()
        return {"accuracy": round(tell("validation", most=LOOK), 4)}

    kept = f"{point['task']}-{slug(name)}"
    curve = learn(model, Learning(kept, settings.seed, steps, settings.rate, loss, look), place)
    row = {
        "spec": one.spec,
        "accuracy": round(tell("test", most=task.count("test")), 4),
        "majority": round(task.majority("test"), 4),
        "tests": task.count("test"),
        "parameters": parameters(model),
        "curve": curve,
    }
    # The weights are no longer needed.
    (place.folder / f"{kept}.pt").unlink(missing_ok=True)
    return row


def checksums(settings: Settings) -> dict[str, str]:
    """Of each task's examples."""
    return {task: settings.load(task).checksum for task in settings.own_tasks()}


EXPERIMENT = Experiment(
    about="the Long Range Arena: every mechanism classifies long sequences; accuracy, speed and memory in one picture",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=lra_report.tables,
    draw=lra_report.draw,
    source=f"{lra_published.SOURCE}; its figure 3, accuracy by speed and memory",
    differs=lra_report.DIFFERS,
    data=checksums,
    takes=("text",),
    minutes=63.0,
)
