from dataclasses import replace

import pytest

from queues import QueueConfig, safe_url


def test_a_bad_value_is_named() -> None:
    with pytest.raises(ValueError, match="max_len must be greater than 0, not 0"):
        QueueConfig(max_len=0)
    with pytest.raises(ValueError, match=r"stream must be letters.*'a b'"):
        QueueConfig(stream="a b")
    with pytest.raises(ValueError, match="when_full must be drop_oldest or wait, not 'panic'"):
        replace(QueueConfig(), when_full="panic")


def test_all_keys_share_the_streams_cluster_slot() -> None:
    config = QueueConfig(stream="a:b")
    assert config.keys[0] == "a:b"
    assert all(key.startswith("{a:b}:") for key in config.keys[1:])


def test_urls_in_logs_hold_no_password() -> None:
    assert safe_url("redis://user:secret@host:6379/0?password=secret") == "redis://host:6379/0"
    assert safe_url("unix:///run/queue.sock?password=secret") == "unix:///run/queue.sock"
