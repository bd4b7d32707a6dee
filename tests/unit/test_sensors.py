"""GPU readings: nothing without a device, NVML's figures scaled right with one."""

from __future__ import annotations

import pytest

from deployments.sensors import NOTHING, RETRY_READS, GpuSample, GpuSensor, summarise

pynvml = pytest.importorskip("pynvml")

GIB = 1024**3


def _rate(gpu_percent: int) -> object:
    return pynvml.c_nvmlUtilization_t(gpu_percent, 0)


def _memory(used: int, total: int) -> object:
    return pynvml.c_nvmlMemory_t(total, total - used, used)


def _has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def test_a_replica_without_devices_reads_nothing() -> None:
    sensor = GpuSensor([])
    assert sensor.sample() == NOTHING
    assert sensor.utilisation_share() is None


@pytest.mark.skipif(_has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_every_read_is_unknown_and_nothing_raises() -> None:
    sensor = GpuSensor(["0"])
    for _ in range(RETRY_READS + 3):  # across a second attempt to start NVML
        assert sensor.sample() == NOTHING
    sensor.shutdown()
    sensor.shutdown()
    assert sensor.utilisation_share() is None


@pytest.mark.skipif(not _has_driver(), reason="this machine has no NVIDIA driver")
def test_with_a_driver_a_share_is_read_before_and_after_shutdown() -> None:
    sensor = GpuSensor(["0"])
    for _ in range(2):
        sample = sensor.sample()
        assert sample.memory_total_bytes is not None
        assert sample.memory_total_bytes > 0
        assert sample.utilisation_share is None or 0 <= sample.utilisation_share <= 1
        sensor.shutdown()


@pytest.mark.skipif(not _has_driver(), reason="this machine has no NVIDIA driver")
def test_an_unknown_device_reads_nothing() -> None:
    assert GpuSensor(["GPU-00000000-0000-0000-0000-000000000000"]).sample() == NOTHING


@pytest.mark.parametrize(("percent", "share"), [(0, 0.0), (37, 0.37), (100, 1.0)])
def test_percent_becomes_a_share(percent: int, share: float) -> None:
    assert summarise([_rate(percent)], [_memory(6 * GIB, 80 * GIB)]) == GpuSample(share, 6 * GIB, 80 * GIB)


def test_several_devices_are_averaged_and_their_memory_is_summed() -> None:
    sample = summarise([_rate(90), _rate(30)], [_memory(GIB, 80 * GIB), _memory(3 * GIB, 80 * GIB)])
    assert sample.utilisation_share == pytest.approx(0.6)
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (4 * GIB, 160 * GIB)


def test_one_unreadable_device_makes_the_figure_unknown_not_lower() -> None:
    sample = summarise([_rate(90), None], [_memory(GIB, 80 * GIB), None])
    assert sample == NOTHING


def test_an_impossible_percentage_is_unknown() -> None:
    assert summarise([_rate(4_000_000_000)], [None]) == NOTHING


def test_no_devices_is_unknown_not_zero() -> None:
    assert summarise([], []) == NOTHING
