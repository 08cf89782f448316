"""The checks with which a worker starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.installed import check_packages
from workers.outcome import InvalidEnvironment

ROOT = Path(__file__).parents[2]
Install = Callable[[str, Path | None], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution that has a package `kernels`: one of its own, or a folder that it shares with another."""

    def install(distribution: str, shared: Path | None) -> None:
        package = tmp_path / "kernels"
        if shared is None:
            package.mkdir()
            (package / "__init__.py").touch()
        else:
            package.symlink_to(shared)
        information = tmp_path / f"{distribution}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (information / "RECORD").write_text("kernels/__init__.py,,\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_our_packages_are_those_that_are_imported() -> None:
    check_packages()


def test_another_distribution_of_the_same_folder_is_named(install: Install) -> None:
    install("kernels", ROOT / "kernels")
    with pytest.raises(InvalidEnvironment, match=r"distribution 'kernels' .* an environment of its own"):
        check_packages()


def test_flopwatch_itself_may_be_installed(install: Install) -> None:
    install("flopwatch", ROOT / "kernels")
    check_packages()


def test_another_package_that_is_imported_instead_is_named(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("other_kernels", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidEnvironment, match=rf"'other_kernels' has .*{tmp_path}"):
        check_packages()


def test_control_a_package_elsewhere_does_no_harm(install: Install) -> None:
    import kernels  # the import system answers with this module from now on

    install("other_kernels", None)
    assert Path(kernels.__file__).parent == ROOT / "kernels"
    check_packages()


@pytest.mark.parametrize("command", ["agent", "run"])
def test_a_worker_says_so_before_it_imports_the_other_package(command: str, install: Install, tmp_path: Path) -> None:
    install("other_kernels", None)
    program = "import sys; sys.path[:0] = sys.argv[2:]; from workers.__main__ import main; main([sys.argv[1]])"
    ended = subprocess.run(
        [sys.executable, "-c", program, command, str(tmp_path), str(ROOT)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert "'other_kernels' has a package 'kernels'" in ended.stderr
    assert "an environment of its own" in ended.stderr
