"""The wheel where nothing else is: in an environment for each extra, and in an image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from loadtest.lab.serve import free_port
from tests.fakes.served import served, tiny_package, word_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "server/deploy"
EXTRAS = "cpu,serve,http,otel,buckets,export,import,loadtest"
ALONE = {"PYTHONPATH": "", "PIP_CONSTRAINT": "", "PIP_BUILD_CONSTRAINT": ""}


def run(*command: str | Path, **environment: str) -> str:
    """Run a command that has to succeed, outside of the clone; return what it printed."""
    done = subprocess.run(
        command,
        cwd="/",
        env={**os.environ, **ALONE, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels: ours, made of its source distribution, and those of the extras."""
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (source,) = folder.glob("*.tar.gz")
    source.unlink()  # the wheel was made of it
    (ours,) = folder.iterdir()
    constraints = ("--constraint", ROOT / "constraints.txt")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "download", *constraints, "--dest", folder, f"{ours}[{EXTRAS}]", "hatchling")
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_package(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Hugging Face."""
    folder = tmp_path_factory.mktemp("original") / "tiny-gpt2"
    words = word_tokenizer(16)
    config = GPT2Config(
        vocab_size=16, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture
def install(wheels: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Install the wheel with its extras into a fresh environment; return its programs."""

    def installed(extras: str) -> Path:
        place = tmp_path / f"with-{extras}"
        venv.create(place, with_pip=True)
        source = ("--no-index", "--find-links", wheels, "--constraint", ROOT / "constraints.txt")
        run(place / "bin/pip", "install", "--quiet", *source, f"tokenweir[{extras}]")
        return place / "bin"

    return installed


@pytest.mark.parametrize("python", ["3.12", "3.13", "3.14"])
def test_every_extra_has_wheels_for_newer_pythons(
    wheels: Path, tmp_path: Path, python: str
) -> None:
    (ours,) = wheels.glob("tokenweir-*")
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed")
    other = ("--python-version", python, "--only-binary", ":all:", "--target", tmp_path)
    constraints = ("--constraint", ROOT / "constraints.txt")

    run(*pip, *other, *constraints, f"{ours}[{EXTRAS}]")


@pytest.mark.ray
def test_server_client_and_load_test_are_three_installs(
    install: Callable[[str], Path], package: Path, tmp_path: Path
) -> None:
    server, client, loadtest = install("serve,cpu"), install(""), install("loadtest")
    port = free_port()
    to = ("--model", "package", "--server", f"127.0.0.1:{port}")
    command = [str(server / "tokenweir")]
    report = tmp_path / "report.json"

    with served(package.parent, "package", command=command, environment=ALONE, port=port):
        answer = run(client / "tokenweir", "generate", *to, "w1", "--max-new-tokens", "3")
        run(loadtest / "tokenweir", "loadtest", *to, "--requests", "8", "--json", report)

    assert len(answer.split()) == 3
    assert json.loads(report.read_text())


def test_a_package_answers_in_a_process_with_the_engine(
    install: Callable[[str], Path], package: Path
) -> None:
    code = (
        "import sys, tokenweir; print(tokenweir.load(sys.argv[1]).generate('package', 'w1').text)"
    )

    assert run(install("cpu") / "python", "-c", code, package).split()


def test_a_checkpoint_is_exported_without_transformers(
    install: Callable[[str], Path], package: Path, tmp_path: Path
) -> None:
    programs = install("cpu,export")

    run(programs / "tokenweir", "export", package.parent / "checkpoint", "--out", tmp_path / "out")

    assert not list(programs.parent.rglob("site-packages/transformers"))
    assert (tmp_path / "out/manifest.json").is_file()


def test_a_model_of_hugging_face_is_imported_and_measured(
    install: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    programs = install("cpu,export,import")

    run(programs / "tokenweir", "import", original, "--out", tmp_path / "checkpoint")
    short = ("--prompt-tokens", "8", "--new-tokens", "8")
    cache = {"TOKENWEIR_CACHE": str(tmp_path / "cache")}
    told = run(programs / "tokenweir", "bench", original, *short, **cache)

    assert (tmp_path / "checkpoint/config.json").is_file()
    assert "tokens/s" in told


@dataclass
class Image:
    """A stage of a Dockerfile, as far as its steps have run in a root of its own."""

    root: Path
    wheels: Path  # mounted at /mnt, where pip finds all
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    user: str = "0"
    folder: str = "/"
    arguments: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()

    def in_it(self) -> list[str]:
        """Return what runs a command in the root, with the mounts that a container has."""
        mounts = ["mount -t proc proc proc", "mount --rbind /dev dev"]
        mounts.append(f"mount --bind {self.wheels} mnt")
        inside = f'cd {self.folder} && exec "$@"'
        enter = f"exec chroot --userspec={self.user}:{self.user} . sh -c '{inside}' sh \"$@\""
        script = " && ".join([f"cd {self.root}", *mounts, enter])
        return ["unshare", "--mount", "sh", "-c", script, "sh"]

    def run(self, *command: str) -> None:
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/mnt", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        run(*self.in_it(), *command, **pip, **self.arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian that the Dockerfile builds on, with Debian's Python for that of the image."""
    if shutil.which("mmdebstrap") is None or os.geteuid():
        pytest.skip("mmdebstrap, or the rights of root, are not there")
    root = tmp_path_factory.mktemp("base")
    packages = "--include=python3,python3-pip,ca-certificates"
    run("mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", root)
    return root


def _build(base: Path, wheels: Path, folder: Path, arguments: Mapping[str, str]) -> Image:
    """Run the steps of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    context = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    stages: dict[str, Image] = {}
    image = Image(folder, wheels)
    for line in re.sub(r"\\\n", "", text).splitlines():
        step, _, rest = line.partition(" ")
        words = shlex.split(rest)
        listed = tuple(json.loads(rest[rest.index("[") :])) if rest.endswith('"]') else ()
        if step == "FROM":
            image = Image(folder / f"stage{len(stages)}", wheels)
            stages[words[-1]] = image
            run("cp", "--archive", "--reflink=auto", base, image.root)
        elif step == "ARG":
            name, _, default = rest.partition("=")
            if (value := arguments.get(name, default)) or default:
                image.arguments[name] = value
        elif step == "SHELL":
            image.shell = listed
        elif step == "RUN":
            image.run(*image.shell, rest)
        elif step == "COPY":
            *sources, target = (word for word in words if not word.startswith("--from="))
            origin = ROOT
            if words[0].startswith("--from="):
                origin = stages[words[0].partition("=")[2]].root
            if sources == ["."]:
                sources = context
            place = image.root / os.path.join(image.folder, target)[1:]
            for source in sources:
                whole = origin / source.lstrip("/")
                run("cp", "--archive", whole, place / source if sources is context else place)
        elif step == "USER":
            image.user = rest
        elif step == "WORKDIR":
            image.folder = rest
            (image.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif step == "HEALTHCHECK":
            image.healthcheck = listed
        elif step == "ENTRYPOINT":
            image.entrypoint = listed
        else:
            assert step in ("", "CMD"), step
    return image


@pytest.mark.ray
@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        pytest.param({}, "package", id="packages"),
        pytest.param({"EXTRAS": "serve,export,import"}, "original", id="models of Hugging Face"),
    ],
)
def test_the_image_of_the_dockerfile_serves(
    base: Path,
    wheels: Path,
    tmp_path: Path,
    arguments: dict[str, str],
    model: str,
    request: pytest.FixtureRequest,
) -> None:
    image = _build(base, wheels, tmp_path, arguments)
    port = free_port()
    of_server = {**ALONE, "TOKENWEIR_SERVER": f"127.0.0.1:{port}", "HOME": image.folder}
    place: Path = request.getfixturevalue(model)
    shutil.copytree(place, image.root / "srv" / place.name)
    run("chmod", "--recursive", "a+rX", image.root / "srv")
    front = image.in_it()

    with served(
        tmp_path,
        f"/srv/{place.name}",
        front=front,
        command=image.entrypoint,
        environment=of_server,
        port=port,
    ) as client:
        assert client.generate(place.name, "w1", max_new_tokens=2).text
        assert "SERVING" in run(*front, *image.healthcheck, **of_server)
