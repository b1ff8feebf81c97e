"""Fixtures: random checkpoints of every family, and exports of the shipped one."""

import gc
import shutil
import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
import torch
from beforehand import COMMANDS, Beforehand
from hub_commands import HEAD, TARGET
from huggingface_hub import constants as hub_constants
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from random_checkpoints import random_model
from stand_in_hub import StandInHub, serving
from transformers import Gemma4ForCausalLM

from eagle3.export.checkpoints import open_source
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention

gc.disable()  # until the tests are collected: imports make a million objects and hardly any garbage
torch.set_num_threads(1)  # a second thread does not speed up such small models, and artifacts are made beside the tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; some tests send SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    text = "orders of the programs in which Triton's interpreter runs each launch: forward (the default), reversed, "
    text += "shuffled, delayed, with commas between them, or all; the results are compared bit for bit"
    parser.addoption("--races", default="forward", metavar="ORDERS", help=text)
    parser.addoption("--whole", action="store_true", help="run every case of every test (scripts/test --whole)")


def pytest_configure(config):
    text = "races(orders): run the launches of a test in these orders, whatever --races says; () checks no launch"
    config.addinivalue_line("markers", text)
    config.addinivalue_line("markers", "whole: run this test only with --whole, or if its file is named")
    config.addinivalue_line(
        "markers", "first(n): run only the first n cases, but all with --whole, or if the file is named"
    )


@pytest.fixture(autouse=True)
def race_free(request):
    """Check every launch of a test by Triton's interpreter for races (``race_detector.py``)."""
    if not hasattr(request.module, "interpreted"):
        yield
        return
    from race_detector import ORDERS, Detector  # they load Triton, which most tests do without
    from race_hooks import watching

    asked = request.config.getoption("--races")
    marker = request.node.get_closest_marker("races")
    orders = marker.args[0] if marker else ORDERS if asked == "all" else asked.split(",")
    if not orders:
        yield
        return
    with watching(Detector(orders), of_arguments=True) as detector:
        yield
    assert not detector.findings, detector.report()


@pytest.fixture(autouse=True)
def seeded(request):
    """Seed random tensors by the name of the test, whatever ran before it in the same process."""
    torch.manual_seed(crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)
def no_hub(tmp_path_factory):
    """Keep tests from asking the Hugging Face hub, and from reading this user's cache of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
        patch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture(scope="session")
def gemma4_31b(tmp_path_factory):
    """Folder and size in bytes of Gemma 4 31B with published shapes, and of a head for it."""
    from published import eagle3, gemma4_config
    from published_checkpoints import save_gemma4_31b, save_head  # they load a compiler, which most tests do without

    folder = tmp_path_factory.mktemp("31B")
    head = eagle3(gemma4_config(60), [2, 30, 57])
    return (folder / "target", save_gemma4_31b(folder / "target")), (folder / "head", save_head(folder / "head", head))


@pytest.fixture
def published(hub, gemma4_31b):
    """The stand-in for the hub with Gemma 4 31B and a head for it."""
    (target, _), (head, _) = gemma4_31b
    spec = TARGETS["gemma4-31B"]
    hub.add(spec.repository, target)
    hub.add(spec.heads[0], head)
    return hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty stand-in for the Hugging Face hub, with an empty cache and an empty working folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with serving(StandInHub()) as stand_in:
        template = stand_in.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "ENDPOINT", stand_in.endpoint)
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        disable_progress_bars()
        yield stand_in
        enable_progress_bars()


@pytest.fixture
def hub_pair(hub):
    """The hub with the shipped target and its head."""
    hub.add(TARGET, TARGETS["gemma4-tiny"].checkpoint)
    hub.add(HEAD, TARGETS["gemma4-tiny"].draft)
    return hub


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A function that maps a target's name to a random transformers model and the folder in which it is saved."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = random_model(name)
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return make


@pytest.fixture
def eager_target(checkpoints):
    """A function that maps a target's name to a new eager ``TapTarget`` with the weights of its random checkpoint."""

    def load(name: str, max_seq_len: int = 128):
        model, folder = checkpoints(name)
        weights = open_source(folder).tensors()
        return TARGETS[name].module().load(weights, model.config, max_seq_len, torch.float32, EagerAttention)

    return load


BEFOREHAND = pytest.StashKey[Beforehand]()
LONGEST_FILE = "test_interpreted_artifact.py"  # takes minutes on one core, most of them in two tests


def named(config) -> bool:
    """Return True if the command names files or tests, all cases of which then run."""
    worker = getattr(config, "workerinput", None)
    return worker["named"] if worker else config.args_source is config.ArgsSource.ARGS


def left_out(items) -> set:
    """Return the tests that run only with ``--whole``: those that are marked, and those of the artifacts of all
    families and kinds of head, which take minutes to make."""
    found, cases = set(), Counter()
    for item in items:
        case = item.path, getattr(item, "originalname", item.name)
        cases[case] += 1
        first = item.get_closest_marker("first")
        whole = item.get_closest_marker("whole") or "family_exports" in item.fixturenames
        if whole or (first and cases[case] > first.args[0]):
            found.add(item)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    try:
        return (yield)
    finally:  # what imports made is not searched again; traces make many objects, and a search costs a tenth of them
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Leave out the tests that run only with ``--whole``, and put the others in order."""
    if not config.getoption("--whole") and not named(config):
        left = left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    in_order(items)


def in_order(items) -> None:
    """Order the files by the time at which their shared exports are ready, but put the longest file after a third of
    them, so that others run beside it. The tests of a file run in one process."""
    names, last = list(COMMANDS), {}
    for item in items:
        wanted = [names.index(name) for name in item.fixturenames if name in names]
        last[item.path] = max([last.get(item.path, -1), *wanted])
    items.sort(key=lambda item: last[item.path])
    files = list(dict.fromkeys(item.path for item in items))
    for longest in [path for path in files if path.name == LONGEST_FILE]:
        files.remove(longest)
        files.insert(len(files) // 3, longest)
    place = {path: number for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


def pytest_sessionstart(session):
    """Make the folder of shared artifacts in the process that controls pytest-xdist's workers, or in the only
    process."""
    worker = getattr(session.config, "workerinput", None)
    session.config.stash[BEFOREHAND] = Beforehand(Path(worker["beforehand"] if worker else tempfile.mkdtemp()))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["beforehand"] = str(node.config.stash[BEFOREHAND].folder)
    node.workerinput["named"] = named(node.config)


@pytest.hookimpl(tryfirst=True)  # runs before a worker reports its collection
def pytest_collection_finish(session):
    config = session.config
    beforehand = config.stash[BEFOREHAND]
    if config.option.collectonly or config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    beforehand.ask({name for item in session.items for name in item.fixturenames} & COMMANDS.keys())
    if not hasattr(config, "workerinput"):
        beforehand.make()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node):
    node.config.stash[BEFOREHAND].make()


def pytest_sessionfinish(session):
    beforehand = session.config.stash[BEFOREHAND]
    if not hasattr(session.config, "workerinput"):
        beforehand.stop()
        shutil.rmtree(beforehand.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def artifact(request):
    """gemma4-tiny exported to the CPU by the command itself, with decode, all in float32: the artifact's folder."""
    return request.config.stash[BEFOREHAND]["artifact"]


@pytest.fixture(scope="session")
def cuda_artifact(request):
    """gemma4-tiny lowered for three GPUs in one by the command itself, with compiled kernels: the artifact's folder.
    The kernels' source is kept beside it (``cuda_artifact.py``)."""
    return request.config.stash[BEFOREHAND]["cuda_artifact"]


@pytest.fixture(scope="session")
def records_artifact(request):
    """gemma4-tiny as in ``cuda_artifact`` for sm_90 alone, with its INT4 weights in records, requests to L2 and early
    launches."""
    return request.config.stash[BEFOREHAND]["records_artifact"]


@pytest.fixture(scope="session")
def host_artifact(request):
    """gemma4-tiny packed as for CUDA and compiled for the CPU (``host_artifact.py``): the artifact's folder."""
    return request.config.stash[BEFOREHAND]["host_artifact"]


@pytest.fixture(scope="session")
def family_exports(request):
    """A folder for each model that ``family_exports.py`` exported, with its target, draft and out."""
    return request.config.stash[BEFOREHAND]["family_exports"]


@pytest.fixture(scope="session")
def session(artifact):
    return open_session(open_artifact(artifact))


@pytest.fixture(scope="module")
def model(session, artifact):
    from eagle3.runner.model import Model

    return Model(session.metadata, lambda: session, artifact)


@pytest.fixture(scope="module")
def server(model, artifact):
    """A server for the model, for test files without a server of their own."""
    from served import served

    with served([model], artifact) as running:
        yield running


@pytest.fixture
def chromium(started_browser):
    """A new tab in a headless browser. Tests that use it are skipped if there is no browser."""
    started_browser.new_tab()
    return started_browser


@pytest.fixture(scope="module")
def started_browser(tmp_path_factory):
    from browser import MISSING, browser

    if MISSING:
        pytest.skip(MISSING)
    with browser(tmp_path_factory.mktemp("profile"), "--window-size=1100,800") as running:
        yield running


@pytest.fixture
def held(session, monkeypatch):
    """An event that holds the target: its methods wait while the event is not set."""
    event, verify = threading.Event(), session.target_verify
    event.set()
    monkeypatch.setattr(session, "target_verify", lambda *given: verify(*given) if event.wait(60) else None)
    yield event
    event.set()


@pytest.fixture(scope="session")
def reference():
    """transformers' own model of the shipped target, in float32."""
    checkpoint = TARGETS["gemma4-tiny"].checkpoint
    return Gemma4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
