"""What `dynamo size` simulates is what mockers as processes behind a frontend do, in real time: within 10 %."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from dynamo.cli.bench.prompts import Length
from dynamo.cli.bench.replay.command import replay_live
from dynamo.cli.bench.targets import Target
from dynamo.cli.size.command import main
from dynamo.cli.size.demand import Demand, trace_of
from dynamo.cli.size.profile import BUILT_IN, Profile, read_profile
from dynamo.cli.size.trial import ReplicaLayout, Trial, run_trial
from dynamo.replay.trace import Stretch, Trace, TraceRequest
from support.processes import Cluster, Frontend, Worker, wait

MODEL = "m"
SPEED = (
    0.25  # of the mocker: what the other processes of a machine take is little beside its times, and is measured, too
)
SEED = 0
MOST_APART = 0.10
LONE_TOKENS = 14  # less than a block
ATTEMPTS = 3  # whoever else uses the machine makes a live run longer, never shorter: not every time
WIDE = msgspec.structs.replace(BUILT_IN, block_size=16, speedup_ratio=SPEED)

pytestmark = pytest.mark.process  # some minutes, nearly all of them waiting


@dataclass(frozen=True)
class Setting:
    """Workers and a load."""

    layout: ReplicaLayout
    demand: Demand
    profile: Profile = WIDE
    kv_bytes_per_token: int = 0  # at 1 GB/s

    @property
    def flags(self) -> list[str]:
        profile = self.profile
        return [
            "--speedup-ratio", str(profile.speedup_ratio), "--block-size", str(profile.block_size),
            "--num-gpu-blocks-override", str(self.layout.kv_blocks), "--max-num-seqs", str(profile.max_sequences),
            "--max-num-batched-tokens", str(profile.max_batched_tokens),
            "--kv-bytes-per-token", str(self.kv_bytes_per_token), "--kv-transfer-bandwidth", "1",
        ]  # fmt: skip


def load(requests: int, rate: float, prompt: str, output: str, prefix: int = 0, groups: int = 1) -> Demand:
    return Demand(requests, rate, Length.of(prompt), Length.of(output), prefix, groups)


NARROW = msgspec.structs.replace(WIDE, max_sequences=4)
MOVES = msgspec.structs.replace(WIDE, transfer_ms_per_1k_tokens=100.0)

SETTINGS = {
    "one worker": Setting(ReplicaLayout("kv", 4096, workers=1), load(30, 3.0, "1000,300", "40,10")),
    "one worker with more than it can do": Setting(
        ReplicaLayout("round-robin", 4096, workers=1), load(30, 5.0, "600,100", "40,10"), NARROW
    ),
    "two workers in turn": Setting(ReplicaLayout("round-robin", 4096, workers=2), load(50, 5.0, "1500,500", "40,10")),
    "two workers and shared prefixes": Setting(
        ReplicaLayout("kv", 4096, workers=2), load(50, 5.0, "3000,200", "30,10", prefix=2400, groups=4)
    ),
    "a cache that is too small": Setting(ReplicaLayout("round-robin", 64, workers=1), load(12, 1.0, "160,40", "60,10")),
    "one prefill, one decode worker": Setting(
        ReplicaLayout("kv", 4096, prefill=1, decode=1), load(30, 2.5, "2000,300", "40,10")
    ),
    "two prefill workers, one decode worker, a slow way": Setting(
        ReplicaLayout("round-robin", 4096, prefill=2, decode=1), load(40, 5.0, "2000,300", "30,10"), MOVES, 100_000
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_simulated_layout_is_within_a_tenth_of_the_mockers(tmp_path: Path, name: str) -> None:
    setting = SETTINGS[name]
    for attempt in range(1, ATTEMPTS + 1):
        with Cluster(made(tmp_path, attempt)) as cluster:
            live = lived(cluster, setting)
        profile = msgspec.structs.replace(setting.profile, overhead_ms=live["overhead_ms"])
        found = run_trial(Trial(profile, setting.demand, setting.layout, SEED))
        ttft, rate = found.latencies["ttft"]["mean"], found.requests_per_second
        print(
            f"\n{name}: TTFT {ttft:.1f} / {live['mean_ttft_ms']:.1f} ms, {rate:.3f} / {live['requests_per_second']:.3f} "
            f"requests/s, ITL {found.latencies['itl']['mean']:.2f} / {live['mean_itl_ms']:.2f} ms, of the TTFT "
            f"{live['overhead_ms']:.1f} ms outside of the engine; {found.preemptions} preempted"
        )
        assert live["finished"] == found.requests
        assert (found.preemptions > 0) == (name == "a cache that is too small")
        is_near = ttft == near(live["mean_ttft_ms"]) and rate == near(live["requests_per_second"])
        if is_near or attempt == ATTEMPTS:
            assert ttft == near(live["mean_ttft_ms"])
            assert rate == near(live["requests_per_second"])
            break


def test_a_measured_mocker_is_sized_as_it_then_behaves(tmp_path: Path) -> None:
    real = msgspec.structs.replace(WIDE, kv_blocks=1024, max_batched_tokens=2048, max_sequences=64)
    setting = Setting(ReplicaLayout("round-robin", 1024, workers=1), load(30, 3.0, "600,200", "30,10"), real)
    timing = real.timing()
    for attempt in range(1, ATTEMPTS + 1):
        out = tmp_path / f"engine{attempt}.json"
        with Cluster(made(tmp_path, attempt)) as cluster:
            frontend = started(cluster, setting)
            assert main(["--measure", frontend.url, "--out", str(out)]) == 0
            live = replay_live(trace_of(setting.demand, SEED), Target.of(frontend.url), MODEL, 1.0)
        profile = read_profile(str(out))
        assert (profile.kv_blocks, profile.block_size) == (1024, 16)
        assert (profile.max_batched_tokens, profile.max_sequences) == (2048, 64)
        pairs = [(ms, timing.prefill_ms(1, tokens, 0) / SPEED) for tokens, ms in profile.prefill]
        for sequences, context, ms in profile.decode:
            pairs.append((ms, timing.decode_ms(sequences * context, context, 1024 * 16) / SPEED))
        found = run_trial(Trial(profile, setting.demand, setting.layout, SEED)).latencies["ttft"]["mean"]
        print(f"\nTTFT {found:.1f} / {live['mean_ttft_ms']:.1f} ms")
        is_measured = all(ms == pytest.approx(expected, rel=0.2) for ms, expected in pairs)
        if (is_measured and found == near(live["mean_ttft_ms"])) or attempt == ATTEMPTS:
            assert [ms for ms, _ in pairs] == pytest.approx([expected for _, expected in pairs], rel=0.2)
            assert found == near(live["mean_ttft_ms"])
            break


def made(tmp_path: Path, attempt: int) -> Path:
    """Make the folder of an attempt."""
    folder = tmp_path / str(attempt)
    folder.mkdir()
    return folder


def near(live: float) -> object:
    """Return what equals a figure that is at most a tenth apart."""
    return pytest.approx(live, rel=MOST_APART)


def lived(cluster: Cluster, setting: Setting) -> dict[str, float]:
    """Send the same trace to real processes."""
    layout = setting.layout
    target = Target.of(started(cluster, setting).url)
    replay_live(alone("first"), target, MODEL, 1.0)  # opens connections
    engine_ms = LONE_TOKENS * setting.profile.transfer_ms_per_1k_tokens / 1000 * layout.is_split
    engine_ms += setting.profile.timing().prefill_ms(1, LONE_TOKENS, 0) / SPEED
    overhead_ms = replay_live(alone("lone"), target, MODEL, 1.0)["median_ttft_ms"] - engine_ms
    live = dict(replay_live(trace_of(setting.demand, SEED), target, MODEL, 1.0))
    return {
        **live,
        "requests_per_second": 1000 * live["finished"] / live["duration_ms"],
        "overhead_ms": max(0.0, overhead_ms),
    }


def started(cluster: Cluster, setting: Setting) -> Frontend:
    """Return a frontend that serves all workers of a setting."""
    layout = setting.layout
    frontend = cluster.frontend("frontend", "--router-mode", layout.mode)
    workers = [cluster.mocker(f"alike{number}", MODEL, *setting.flags) for number in range(layout.workers)]
    for role, count in (("prefill", layout.prefill), ("decode", layout.decode)):
        workers += [
            cluster.mocker(f"{role}{number}", MODEL, "--disaggregation-mode", role, *setting.flags)
            for number in range(count)
        ]
    ready(frontend, workers)
    return frontend


def alone(name: str) -> Trace:
    """Return short requests, none of which meets another one or shares a block with it."""
    key = int.from_bytes(name.encode(), "big")
    return Trace(name, [TraceRequest(f"{n}", 400.0 * n, (Stretch(key + n, LONE_TOKENS),), 2) for n in range(5)])


def ready(frontend: Frontend, workers: list[Worker]) -> None:
    """Return when the frontend serves all of them."""
    frontend.wait_ready()
    for worker in workers:
        worker.wait_ready()
    wait(lambda: known(frontend) == len(workers), lambda: f"{len(workers)} workers; log:\n{frontend.log}")


def known(frontend: Frontend) -> int:
    status, body = frontend.get(f"/v1/models/{MODEL}/ready")
    if status != 200:
        return 0
    namespaces = msgspec.json.decode(body)["namespaces"].values()
    return sum(role["workers"] for one in namespaces for role in one["worker_types"].values())
