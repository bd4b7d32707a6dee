"""GPU readings: nothing without a device; NVML's figures scaled right with a recorded device, and with a live one."""

from __future__ import annotations

import sys

import pytest

pynvml = pytest.importorskip("pynvml")

from deployments.sensors import EVENTS_MAX, RETRY_READS, GpuSensor, RawDevice, summarise  # noqa: E402
from policies.measures import GpuReading  # noqa: E402
from policies.roofline import DEVICES  # noqa: E402
from tests.unit.recorded_nvml import H100, H200, HOT_H100, MIG, RecordedNvml  # noqa: E402

XID = pynvml.nvmlEventTypeXidCriticalError


def _has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


live = pytest.mark.skipif(not _has_driver(), reason="this machine has no NVIDIA driver")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> RecordedNvml:
    recorded = RecordedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", recorded)
    return recorded


def xids(sensor: GpuSensor) -> int | None:
    reading = sensor()
    assert reading is not None
    return reading.xid_errors


# --- no device --------------------------------------------------------------------------------------------------------


def test_a_replica_without_devices_reads_nothing() -> None:
    sensor = GpuSensor([])
    assert sensor() is None
    assert sensor.device_name() is None


@pytest.mark.skipif(_has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_every_read_is_unknown_and_nothing_raises() -> None:
    sensor = GpuSensor(["0"])
    for _ in range(RETRY_READS + 3):  # across a second attempt to start NVML
        assert sensor() is None
    sensor.shutdown()
    sensor.shutdown()
    assert sensor() is None


def test_an_unknown_device_reads_nothing(nvml: RecordedNvml) -> None:
    sensor = GpuSensor(["GPU-00000000-0000-0000-0000-000000000000"])
    assert sensor() is None
    assert nvml.started == 0


# --- a recorded device ------------------------------------------------------------------------------------------------


def test_an_h100_under_load_in_our_units(nvml: RecordedNvml) -> None:
    assert GpuSensor([H100])() == GpuReading(
        sm_share=0.98,
        memory_share=0.61,
        memory_used_bytes=77_309_411_328,
        memory_total_bytes=85_520_809_984,
        power_w=641.25,
        power_limit_w=700.0,
        temperature_c=66.0,
        throttle=(),
        ecc_errors=0,
        xid_errors=0,
    )
    assert nvml.registered == [(H100, XID)]


def test_two_devices_of_one_replica_are_averaged_summed_and_the_hottest_counts(nvml: RecordedNvml) -> None:
    reading = GpuSensor([H100, HOT_H100])()
    assert reading is not None
    assert reading.sm_share == pytest.approx(0.94)
    assert reading.memory_share == pytest.approx(0.58)
    assert reading.power_w == pytest.approx(1_340.37)
    assert reading.power_limit_w == 1_400
    assert reading.memory_used_bytes == 150_323_855_360
    assert (reading.temperature_c, reading.ecc_errors) == (88.0, 2)
    assert reading.throttle == ("hw_thermal_slowdown", "sw_power_cap", "sw_thermal_slowdown")
    assert GpuSensor([H100, HOT_H100]).device_name() == "NVIDIA H100 80GB HBM3"
    assert GpuSensor([H100, H200]).device_name() is None


def test_idle_clocks_are_no_throttling(nvml: RecordedNvml) -> None:
    reading = GpuSensor(["2"])()  # the H200, by index
    assert reading is not None
    assert (reading.throttle, reading.sm_share, reading.power_w) == ((), 0.0, 76.41)
    assert GpuSensor([H200]).device_name() in DEVICES


def test_what_a_slice_of_a_device_does_not_say_is_unknown(nvml: RecordedNvml) -> None:
    reading = GpuSensor([MIG])()
    assert reading == GpuReading(memory_used_bytes=1_174_405_120, memory_total_bytes=42_278_584_320)
    both = GpuSensor([H100, MIG])()
    assert both is not None
    assert (both.sm_share, both.power_w, both.ecc_errors, both.xid_errors) == (None, None, None, None)
    assert both.memory_total_bytes == 127_799_394_304


def test_xid_errors_add_up_and_those_of_programs_do_not_count(nvml: RecordedNvml) -> None:
    sensor = GpuSensor([H100])
    assert xids(sensor) == 0
    nvml.events.extend([(XID, 79), (XID, 31), (pynvml.nvmlEventTypePState, 79), (XID, 48)])
    assert xids(sensor) == 2
    assert xids(sensor) == 2
    nvml.events.append((XID, 94))
    assert xids(sensor) == 3


def test_a_storm_of_events_is_read_in_pieces(nvml: RecordedNvml) -> None:
    sensor = GpuSensor([H100])
    assert xids(sensor) == 0
    nvml.events.extend([(XID, 63)] * (EVENTS_MAX + 5))
    assert [xids(sensor) for _ in range(2)] == [EVENTS_MAX, EVENTS_MAX + 5]


def test_a_device_that_is_lost_leaves_readings_unknown_and_never_raises(nvml: RecordedNvml) -> None:
    sensor = GpuSensor([H100])
    assert sensor() is not None
    nvml.wait_error = pynvml.NVML_ERROR_GPU_IS_LOST
    for call in list(nvml.answers[H100]):
        nvml.answers[H100][call] = {"error": pynvml.NVML_ERROR_GPU_IS_LOST}
    assert sensor() == GpuReading()
    assert sensor() == GpuReading()


def test_nvml_is_let_go_and_starts_again(nvml: RecordedNvml) -> None:
    sensor = GpuSensor([H100])
    sensor()
    assert (nvml.started, nvml.sets) == (1, 1)
    sensor.shutdown()
    assert (nvml.started, nvml.sets) == (0, 0)
    assert sensor() is not None
    assert nvml.started == 1


def test_impossible_figures_are_unknown() -> None:
    assert summarise([RawDevice(gpu_percent=4_000_000_000)], {}, None) == GpuReading()
    assert summarise([], {}, None) == GpuReading()


# --- a live device ----------------------------------------------------------------------------------------------------


@live
def test_a_live_device_says_what_a_data_centre_gpu_says() -> None:
    sensor = GpuSensor(["0"])
    for _ in range(2):
        reading = sensor()
        assert reading is not None
        assert reading.memory_total_bytes is not None
        assert reading.memory_used_bytes is not None
        assert 0 < reading.memory_used_bytes <= reading.memory_total_bytes
        assert reading.sm_share is None or 0 <= reading.sm_share <= 1
        assert reading.temperature_c is None or 0 < reading.temperature_c < 120
        if reading.power_w is not None and reading.power_limit_w is not None:
            assert 0 < reading.power_w < 2 * reading.power_limit_w
        assert reading.ecc_errors is None or reading.ecc_errors >= 0
        assert reading.xid_errors in {None, 0}
        sensor.shutdown()


@live
def test_a_live_machine_without_such_a_device_reads_nothing() -> None:
    assert GpuSensor(["GPU-00000000-0000-0000-0000-000000000000"])() is None
