"""The kernels, executed on a CPU (tests/emulation), and the emulation's own proof that it finds what it looks for.

None of this shows speed, occupancy, the memory ordering of a real GPU or the behaviour of streams.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from emulation import build as emulation

# How a planted bug is looked for: the program's build, and the emulation's settings. ThreadSanitizer gets 3 workers, so
# that blocks really run beside each other.
RUNS = {
    "forward": ("plain", {"order": "forward"}),
    "reverse": ("plain", {"order": "reverse"}),
    "random": ("plain", {"order": "random"}),
    "strict": ("plain", {"strict": True}),
    "address": ("address", {}),
    "thread": ("thread", {"workers": 3}),
}
WRONG = r"^wrong result: "
RACE = r"WARNING: ThreadSanitizer: data race"

# Which runs find which bug of planted.cu, and what they say. No other run may find it: what this table says that a run
# cannot see is why the other runs are there.
FOUND_BY = {
    "missing_barrier": {"reverse": WRONG, "random": WRONG, "thread": RACE},
    "divergent_barrier": {"strict": r"^emulation: .*threads of one block wait at different barriers"},
    "barrier_after_exit": {"strict": r"^emulation: .*a barrier that not all threads of the block reach"},
    "missing_bound": {"address": r"AddressSanitizer: heap-buffer-overflow(.*\n)*?WRITE of size 4"},
    "misaligned_vector": {"address": r"runtime error: .*misaligned address .* 'const struct float4'"},
    "missing_fence": {"thread": RACE},
    "plain_counter": {"thread": RACE},
    "wrong_mask": {"strict": r"^emulation: .*a mask lacks the calling lane"},
    "missing_syncwarp": {"reverse": WRONG, "random": WRONG, "thread": RACE},
    "deadlock": dict.fromkeys(RUNS, r"^emulation: .*deadlock, the lanes of a mask wait at different places"),
}


class Programs:
    """Programs of tests/emulation, each built once in each way that is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.built: dict[tuple[str, str], Path] = {}

    def get(self, name: str, sanitizer: str, sources: tuple[Path, ...]) -> Path:
        """The program's path. Without the sanitizer's runtime the test fails; skipped where there is none at all."""
        if (name, sanitizer) not in self.built:
            try:
                target = emulation.build(list(sources), self.folder / f"{name}_{sanitizer}", sanitizer)
            except emulation.NoSanitizer as error:
                if error.any_other:
                    raise
                pytest.skip(str(error))
            self.built[name, sanitizer] = target
        return self.built[name, sanitizer]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("emulation"))


def run(programs: Programs, name: str, how: str, *arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    """Run planted or primitives in the way that RUNS names, with other settings where they are given."""
    sanitizer, own = RUNS[how]
    program = programs.get(name, sanitizer, (emulation.HERE / f"{name}.cu",))
    return emulation.execute(program, list(arguments), **{**own, **settings})


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("how", ["forward", "address", "thread"])
def test_right_kernels_pass_in_every_run(programs: Programs, how: str, order: str, strict: bool) -> None:
    done = run(programs, "planted", how, "all", "right", order=order, strict=strict)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", FOUND_BY)
def test_planted_bug_is_found_by_exactly_these_runs(programs: Programs, name: str) -> None:
    for how in RUNS:
        done = run(programs, "planted", how, name, "bug")
        said = done.stdout + done.stderr
        if how in FOUND_BY[name]:
            assert done.returncode != 0, f"{how} did not find it"
            assert re.search(FOUND_BY[name][how], said, re.MULTILINE), f"{how} found something else:\n{said}"
        else:
            assert (done.returncode, said) == (0, ""), f"{how} found it too; the table does not say so"


@pytest.mark.parametrize("how", RUNS)
def test_barriers_warp_operations_atomics_and_launches_are_those_of_cuda(programs: Programs, how: str) -> None:
    done = run(programs, "primitives", how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Every launcher on the driver's windows. Each order and mode with the plain build, which is quick; out of bounds and
# races once in each case that can have them.
DRIVER = [
    *(
        ("forward", case, order, True)
        for case in ("small", "large", "deep")
        for order in ("forward", "reverse", "random")
    ),
    ("forward", "small", "forward", False),
    *(("address", case, "forward", False) for case in ("small", "large", "deep")),
    *(("thread", case, order, True) for case in ("few", "deep") for order in ("forward", "reverse", "random")),
]


@pytest.mark.parametrize(("how", "case", "order", "strict"), DRIVER)
def test_kernels(programs: Programs, how: str, case: str, order: str, strict: bool) -> None:
    sources = (emulation.HERE / "driver.cpp", emulation.HERE / "steps.cpp", *sorted(emulation.CSRC.glob("cuda/*.cu")))
    sanitizer, own = RUNS[how]
    program = programs.get("driver", sanitizer, sources)
    done = emulation.execute(program, [case], **{**own, "order": order, "strict": strict})
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 10_000, "values checked"


def test_unknown_settings_are_refused(programs: Programs) -> None:
    program = programs.get("primitives", "plain", (emulation.HERE / "primitives.cu",))
    for settings, words in (({"order": "sideways"}, "not sideways"), ({"workers": 0}, "workers is 1 to 64, not 0")):
        done = emulation.execute(program, [], **settings)
        assert done.returncode != 0
        assert words in done.stderr
