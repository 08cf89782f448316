import random

from workers.agent.log import CappedLog


def test_the_middle_of_long_output_is_cut_and_counted() -> None:
    log = CappedLog(head_bytes=4, tail_bytes=4)
    for letter in b"abcdefghijklmnop":
        log.write(bytes([letter]))
    assert log.text() == "abcd\n[… 8 bytes cut …]\nmnop"
    assert log.head(2) == "ab"
    assert log.tail(2) == "op"


def test_memory_is_bounded_whatever_is_written(rng: random.Random) -> None:
    log = CappedLog(head_bytes=1000, tail_bytes=1000, live_bytes=500)
    total = 0
    for _ in range(2000):
        chunk = bytes(rng.randrange(97, 123) for _ in range(rng.randrange(1, 200)))
        log.write(chunk)
        total += len(chunk)
    text = log.text()
    cut = int(text.split("[… ")[1].split()[0])
    note = f"\n[… {cut} bytes cut …]\n"
    assert len(text) - len(note) + cut == total
    assert len(text) < 1000 + 1000 + 200 + len(note)
    assert len(log.drain()) < 700


def test_live_output_never_splits_a_character() -> None:
    log = CappedLog()
    euro = "€".encode()
    log.write(b"a" + euro[:2])
    assert log.drain() == "a"
    log.write(euro[2:] + b"b")
    assert log.drain() == "€b"
    assert log.drain() == ""


def test_followers_get_the_tail_at_the_end() -> None:
    log = CappedLog(head_bytes=4, tail_bytes=4, live_bytes=6)
    log.write(b"abcdefgh")
    log.write(b"ijklmnop")
    live = log.drain()
    assert live.startswith("abcdef\n[live output ends here")
    log.end()
    assert log.drain() == "[… 6 bytes cut …]\nmnop"
