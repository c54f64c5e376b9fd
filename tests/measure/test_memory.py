"""The memory of a case's tensors: where it lies, and how much of it is in huge pages."""

import pytest

from ddpbench.measure import memory

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", memory.KINDS)
@pytest.mark.parametrize("count", [1, 1 << 20])
def test_tensors_are_zero_and_can_be_written(kind: str, count: int) -> None:
    """To their end; one that asks for huge pages begins 64 bytes into one, where torch's allocator
    puts a large tensor in its page."""
    tensor = memory.zeros(count, torch.float32, torch.device("cpu"), kind)
    assert tensor.shape == (count,)
    assert not tensor.any()
    if kind == "huge":
        assert tensor.data_ptr() % memory.HUGE_NBYTES == memory.IN_PAGE
    assert tensor.fill_(1).sum() == count


def test_the_share_in_huge_pages_is_of_the_bytes() -> None:
    """Between none and all of what was written; not known of no bytes, nor without the kernel's
    word, nor of half of the tensors."""
    huge = memory.zeros(1 << 20, torch.float32, torch.device("cpu"), "huge").fill_(1)
    share = memory.huge_share([huge, huge], "huge")
    assert share is not None
    assert 0 <= share <= 1
    assert memory.huge_share([], "huge") is None
    assert memory.huge_share([torch.empty(0)], "huge") is None


def test_the_kernels_count_is_taken_by_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor has the share of its own mapping, weighted by its bytes."""
    large, small = torch.zeros(3 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)

    def mapping(tensor: torch.Tensor, resident: int, granted: int) -> str:
        start = tensor.data_ptr()
        return (
            f"{start:x}-{start + tensor.nbytes:x} rw-p 00000000 00:00 0 \n"
            f"Size: 9999 kB\nRss:  {resident} kB\nAnonHugePages:    {granted} kB\nVmFlags: rd\n"
        )

    told = mapping(large, 4096, 2048) + mapping(small, 1024, 0)
    monkeypatch.setattr(memory, "read", lambda _: told)
    assert memory.huge_share([large, small], "huge") == pytest.approx(0.5 * 3 / 4)
    assert memory.huge_share([large, torch.zeros(9)], "huge") is None
    monkeypatch.setattr(memory, "read", lambda _: None)
    assert memory.huge_share([large], "huge") is None
