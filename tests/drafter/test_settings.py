"""Where state lives, read from an environment given by the test."""

from pathlib import Path

import pytest

from drafter.settings import read_settings


def test_home_by_default_follows_xdg_then_the_home_folder():
    assert read_settings({"HOME": "/h"}).home == Path("/h/.local/share/eyas")
    assert read_settings({"HOME": "/h", "XDG_DATA_HOME": "/x"}).home == Path("/x/eyas")
    assert read_settings({"HOME": "/h", "XDG_DATA_HOME": "/x", "EYAS_HOME": "/e"}).home == Path("/e")


def test_empty_variables_count_as_unset():
    settings = read_settings({"HOME": "/h", "EYAS_HOME": "", "XDG_DATA_HOME": "", "EYAS_KEYS_FILE": ""})
    assert settings.home == Path("/h/.local/share/eyas")
    assert settings.keys_file is None


def test_the_folders_under_home():
    settings = read_settings({"EYAS_HOME": "/e"})
    assert (settings.models, settings.drafters, settings.runs) == (
        Path("/e/models"),
        Path("/e/drafters"),
        Path("/e/runs"),
    )


def test_the_files_that_may_be_named():
    settings = read_settings({"EYAS_KEYS_FILE": "/k", "EYAS_ADMIN_KEY_FILE": "/a", "EYAS_CAPTURE_DIR": "/c"})
    assert (settings.keys_file, settings.admin_key_file, settings.capture_dir) == (Path("/k"), Path("/a"), Path("/c"))


def test_a_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somebody")
    assert read_settings({"EYAS_HOME": "~/state"}).home == Path("/somebody/state")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EYAS_HOME", "/from-the-process")
    assert read_settings().home == Path("/from-the-process")


def test_log_levels():
    assert read_settings({}).log == "info"
    assert read_settings({"EYAS_LOG": "DEBUG"}).log == "debug"
    with pytest.raises(ValueError, match=r"EYAS_LOG is 'loud', expected one of debug, info, warning, error"):
        read_settings({"EYAS_LOG": "loud"})


def test_systemds_socket_is_read_with_the_rest():
    assert read_settings({"HOME": "/h", "NOTIFY_SOCKET": "@x"}).notify_socket == "@x"
    assert read_settings({"HOME": "/h", "NOTIFY_SOCKET": ""}).notify_socket is None


def test_torchruns_processes_are_one_where_it_did_not_start_this():
    assert read_settings({"HOME": "/h", "LOCAL_WORLD_SIZE": "8"}).local_world == 8
    assert read_settings({"HOME": "/h"}).local_world == 1
