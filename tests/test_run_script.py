"""tools/run and tools/find_python, with stand-ins for Python that install nothing."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SYSTEM_TOOLS = (
    "awk", "bash", "cat", "chmod", "cmp", "cp", "dirname", "env", "grep", "head", "ln", "mkdir",
    "rm", "sh", "sleep",
)  # fmt: skip

# Makes and fills environments by name only; the rest goes to the real one.
STAND_IN = """#!/bin/sh
case "$*" in
    *sys.executable*) echo "$0" ;;
    "-m venv --clear "*)
        echo venv >>"$LOG"
        rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
        echo "#!$4/bin/python" >"$4/bin/pip"
        printf '#!/bin/sh\\necho "tpuspec $*"\\n' >"$4/bin/tpuspec"
        chmod +x "$4/bin/tpuspec" ;;
    *"pip"*" install "*"--editable"*) echo editable >>"$LOG" ;;
    *"pip"*" install "*)
        echo "install" >>"$LOG"
        echo "Collecting something"
        sleep "${INSTALL_SECONDS:-0}"
        exit "${INSTALL_STATUS:-0}" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "a checkout"
    (folder / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "requirements.lock", "requirements-test.lock"):
        shutil.copy2(ROOT / name, folder)
    for name in ("run", "find_python"):
        shutil.copy2(ROOT / "tools" / name, folder / "tools")
    return folder


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """A machine with the system's tools and no Python at all."""
    names = tmp_path / "bin"
    names.mkdir()
    for name in SYSTEM_TOOLS:
        found = shutil.which(name)
        assert found, f"the test needs {name}"
        (names / name).symlink_to(found)
    return {
        "PATH": str(names),
        "HOME": str(tmp_path / "home"),
        "LOG": str(tmp_path / "log"),
        "REAL_PYTHON": sys.executable,
    }


def script(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def start(checkout: pathlib.Path, environment: dict[str, str], *arguments: str):
    return subprocess.Popen(
        [checkout / "tools" / "run", *arguments], env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def run(checkout: pathlib.Path, environment: dict[str, str], *arguments: str):
    process = start(checkout, environment, *arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def steps(environment: dict[str, str]) -> list[str]:
    log = pathlib.Path(environment["LOG"])
    return log.read_text().split() if log.exists() else []


@pytest.fixture
def stand_in(environment: dict[str, str]) -> None:
    script(pathlib.Path(environment["PATH"], "python3.12"), STAND_IN)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_usage_is_printed_without_any_set_up(checkout, environment, arguments) -> None:
    status, out, _ = run(checkout, environment, *arguments)
    assert status == 0
    assert "demo" in out and "test" in out


def test_an_unknown_command_is_refused(checkout, environment) -> None:
    status, out, err = run(checkout, environment, "dmeo")
    assert (status, out) == (2, "")
    assert '"dmeo"' in err and "usage" in err


def test_without_python_it_says_what_to_install(checkout, environment) -> None:
    status, _, err = run(checkout, environment, "demo")
    assert status == 1
    assert "Python 3.12 or newer" in err
    assert "apt-get install" in err and "uv python install" in err
    assert not (checkout / ".venv").exists()


def test_an_old_python_and_a_broken_shim_are_passed_over(checkout, environment, tmp_path) -> None:
    names = pathlib.Path(environment["PATH"])
    script(names / "python3", "#!/bin/sh\necho is 3.11.2; exit 1\n")
    script(names / "python3.13", "#!/bin/sh\necho 'pyenv: command not found'; exit 127\n")
    status, _, err = run(checkout, environment, "demo")
    assert status == 1
    assert "python3: is 3.11.2" in err
    assert "python3.13: pyenv: command not found" in err

    for home in ("home/.pyenv", "elsewhere"):
        here = script(tmp_path / home / "versions/3.12.9/bin/python3", STAND_IN)
        extra = {} if home.startswith("home") else {"PYENV_ROOT": str(tmp_path / home)}
        found = subprocess.run(
            [checkout / "tools" / "find_python"], env=environment | extra, check=True,
            text=True, capture_output=True,
        )  # fmt: skip
        assert found.stdout.strip() == str(here)
        here.unlink()


def test_uv_is_asked_last(checkout, environment) -> None:
    answer = script(pathlib.Path(environment["HOME"], "uv-python"), STAND_IN)
    script(pathlib.Path(environment["PATH"], "uv"), f'#!/bin/sh\necho "{answer}"\n')
    status, out, _ = run(checkout, environment, "tpuspec", "serve")
    assert (status, out.splitlines()[-1]) == (0, "tpuspec serve")


@pytest.mark.usefixtures("stand_in")
class TestSetUp:
    def test_the_second_call_starts_at_once(self, checkout, environment) -> None:
        status, out, _ = run(checkout, environment, "demo", "--json")
        assert (status, out) == (0, "tpuspec demo --json\n")  # set-up speaks on stderr
        assert steps(environment) == ["venv", "install", "editable"]
        status, out, err = run(checkout, environment, "tpuspec", "generate", "two words")
        assert (status, out, err) == (0, "tpuspec generate two words\n", "")
        assert steps(environment) == ["venv", "install", "editable"]

    def test_the_working_folder_stays_the_users(self, checkout, environment, tmp_path) -> None:
        run(checkout, environment, "demo")
        script(checkout / ".venv/bin/tpuspec", "#!/bin/sh\npwd\n")
        out = subprocess.check_output(
            [checkout / "tools" / "run", "demo"], env=environment, cwd=tmp_path, text=True
        )
        assert out.strip() == str(tmp_path)

    @pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
    def test_a_changed_lock_installs_again(self, checkout, environment, name) -> None:
        run(checkout, environment, "demo")
        with (checkout / name).open("a") as file:
            file.write("# changed\n")
        run(checkout, environment, "demo")
        assert steps(environment) == ["venv", *["install", "editable"] * 2]

    def test_two_calls_at_once_install_once(self, checkout, environment) -> None:
        slow = environment | {"INSTALL_SECONDS": "1"}
        processes = [start(checkout, slow, "demo") for _ in range(3)]
        endings = [process.communicate(timeout=60) for process in processes]
        assert all(out.endswith("tpuspec demo\n") for out, _ in endings)
        assert any("waiting for another call" in err for _, err in endings)
        assert steps(environment) == ["venv", "install", "editable"]

    def test_a_killed_installation_starts_over(self, checkout, environment) -> None:
        process = start(checkout, environment | {"INSTALL_SECONDS": "60"}, "demo")
        while steps(environment) != ["venv", "install"]:
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        status, _, _ = run(checkout, environment, "demo")
        assert status == 0
        assert steps(environment) == ["venv", "install", "venv", "install", "editable"]

    def test_a_failed_installation_is_tried_again_and_keeps_what_it_has(
        self, checkout, environment
    ) -> None:
        status, out, err = run(checkout, environment | {"INSTALL_STATUS": "1"}, "demo")
        assert (status, out) == (1, "")
        assert "installation failed" in err
        status, _, _ = run(checkout, environment, "demo")
        assert status == 0
        assert steps(environment) == ["venv", "install", "install", "editable"]

    def test_a_moved_checkout_makes_a_new_environment(self, checkout, environment) -> None:
        run(checkout, environment, "demo")
        moved = checkout.rename(checkout.with_name("moved"))
        run(moved, environment, "demo")
        assert steps(environment) == ["venv", "install", "editable"] * 2

    def test_the_test_packages_are_installed_for_tests_only(self, checkout, environment) -> None:
        run(checkout, environment, "demo")
        assert not (checkout / ".venv" / "requirements-test.lock.installed").exists()
        for name in ("ruff", "mypy", "pytest"):
            script(checkout / f".venv/bin/{name}", f'#!/bin/sh\necho "{name} $*" >>"$LOG"\n')
        pathlib.Path(environment["LOG"]).unlink()
        for name in ("tpuspec", "kernels", "serving", "protos"):
            (checkout / name).mkdir()
        for _ in range(2):
            status, _, _ = run(checkout, environment, "test", "-k", "a name")
            assert status == 0
        once = ["ruff check .", "mypy --config-file ../pyproject.toml",
                "pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -k a name"]
        log = pathlib.Path(environment["LOG"]).read_text().splitlines()
        assert log == ["install", "editable", *once, *once]
