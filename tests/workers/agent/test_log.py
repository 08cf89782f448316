from workers.agent.log import CappedLog


def test_the_middle_of_long_output_is_cut_and_counted() -> None:
    log = CappedLog(head_bytes=4, tail_bytes=4)
    for letter in b"abcdefghijklmnop":
        log.write(bytes([letter]))
    assert log.text() == "abcd\n[… 8 bytes cut …]\nmnop"
    assert log.head(2) == "ab"
    assert log.tail(2) == "op"


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
