"""The command line, the job file and what they make: `mpips.config`."""

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips import problems
from mpips.config import OPTIONS, Config, names
from mpips.config.command_line import (
    FLAGS,
    CommandLine,
    help_text,
    in_python,
    parse_command_line,
)
from mpips.config.delay import DELAYS, check_delays, linger, parse_delays
from mpips.config.groups import Group, members, parse_groups, text_of
from mpips.config.jobfile import from_toml, read_toml, resolve, split_words, to_toml
from mpips.config.names import LAYOUT_FIELDS
from mpips.config.option import Option, called_elsewhere, meant, shown
from mpips.config.validation import check_resume
from mpips.errors import UserError, reworded
from mpips.optim import rules as optim

NAMES = sorted(OPTIONS)


def job_file(folder: Path, text: str, name: str = "job.toml") -> str:
    """Write a job file and return its path."""
    (folder / name).write_text(text)
    return str(folder / name)


def load(argv: list[str], saved: dict[str, Any] | None = None) -> Config:
    """Resolve a command line with its job file, over a saved run."""
    line = parse_command_line(argv)
    return resolve(line.options, read_toml(line.job) if line.job else None, saved)


def message_of(argv: list[str]) -> str:
    """Return the message of the error that a command line ends in."""
    with pytest.raises(UserError) as caught:
        load(argv)
    return str(caught.value)


def test_names_are_those_of_what_there_is() -> None:
    assert set(names.OPTIMIZERS) == set(optim.RULES)
    assert set(names.PROBLEMS) == set(problems.PROBLEMS)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--servers 2", "servers", 2),
        ("--lr 1", "lr", 1.0),
        ("--hidden 512,256", "hidden", (512, 256)),
        ("--hidden=", "hidden", ()),
        ("--quiet", "quiet", True),
        ("--no-quiet", "quiet", False),
        ("--resume auto --resume=", "resume", ""),
        ("--seed 1 --seed 2", "seed", 2),
        ("--out=--odd=name", "out", "--odd=name"),
    ],
)
def test_command_line_values(words: str, name: str, value: Any) -> None:
    line = parse_command_line(words.split())
    assert line == CommandLine(None, {name: value}, frozenset())
    assert type(line.options[name]) is type(value)


def test_an_option_at_the_end_without_a_value() -> None:
    for option in (o for o in OPTIONS.values() if o.kind is not bool):
        if option.bare is not None:
            assert parse_command_line([option.flag]).options == {option.name: option.bare}
            continue
        for argv in ([option.flag], [option.flag, "--seed", "3"]):
            message = message_of(argv)
            assert message.startswith(f"option {option.flag} without a value, expected ")
            assert f"write {option.flag} " in message


@settings(deadline=None, max_examples=10)
@given(st.lists(st.text(max_size=12) | st.sampled_from([o.flag for o in OPTIONS.values()])))
def test_any_command_line_gives_a_config_or_a_user_error(argv: list[str]) -> None:
    try:
        line = parse_command_line(argv)
        made = resolve(line.options)
    except UserError:
        return
    assert from_toml(to_toml(made)) == made


def test_help_tells_every_option_its_default_and_what_is_legal() -> None:
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= 100
    heads = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == [*dict.fromkeys(o.group for o in OPTIONS.values()), "explain", "other"]
    text = " ".join([*help_text().split(), ""])
    assert all(flag in text for flag in FLAGS)
    for option in OPTIONS.values():
        assert f"{option.flag} " in text or f"{option.flag}, --no-" in text
        assert all(legal in text for legal in option.legal)
        note = text.partition(f"{option.help} [")[2].partition("] ")[0]
        assert not option.modes or note.endswith(f"; mode {' or '.join(option.modes)}")
    assert f"[one of {', '.join(names.PROBLEMS)}, path/file.py:Class; default: mlp]" in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('servers = "2"', ["servers '2', expected an integer >= 0;", "without quotes"]),
        ("lr = true", ["lr true, expected a number > 0"]),
        (f"lr = 1{'0' * 400}", ["lr 1000", "expected a number"]),
        ("hidden = [64, true]", ["hidden [64, True], expected a list"]),
        ("out = 1979-05-27", ["out datetime.date(1979, 5, 27), expected text"]),
        ('out = "a\\u0000b"', ["out 'a\\x00b', expected text"]),
        ("batch-size = 2", ["unknown key 'batch-size'", "did you mean 'batch_size'?"]),
        ("[cluster]\nservers = 2", ["table [cluster], expected keys without tables"]),
        ("seed = 1\nmode = sync", ["line 2", "expected TOML", "quotes"]),
        (f"hidden = {'[' * 5000}", ["expected TOML"]),
    ],
)
def test_job_file_errors_name_the_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = job_file(tmp_path, text)
    message = message_of([path])
    assert all(part in message for part in [path, *parts]), message


def test_what_is_no_job_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text("")
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.toml")
    for name, told in {
        "digit.toml": "not found, expected an existing file; did you mean 'digits.toml'?",
        "pipe.toml": "pipe.toml' is a pipe or a device, expected a file",
        "no/folder/job.toml": "not found",
        "folder.toml": "expected a readable file",
        "digits.toml/job.toml": "job file",
        "binary.toml": "expected text in UTF-8",
        "": f"a run is continued by --resume --out {tmp_path}",
    }.items():
        assert told in message_of([str(tmp_path / name)])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_job_file_in_a_folder_of_somebody_else(tmp_path: Path) -> None:
    file = job_file(tmp_path, "")
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        told = message_of([file])
    finally:
        os.seteuid(0)
    assert "Permission denied, expected a readable file" in told


def test_precedence(tmp_path: Path) -> None:
    job = job_file(tmp_path, "seed = 2\nkeep = 2\nservers = 2\n")
    saved = {"seed": 2, "keep": 1, "servers": 1, "log_every": 9.0}
    got = load([job, "--servers", "3"], saved)
    assert got == Config(seed=2, keep=2, servers=3, log_every=9.0)
    assert load([]) == Config() == load([job_file(tmp_path, "", "empty.toml")])
    typed = job_file(tmp_path, "hidden = [5, 4]\nlr = 1", "typed.toml")
    assert load(f"--resume {typed} --seed=3".split()) == Config(
        resume="yes", seed=3, hidden=(5, 4), lr=1.0
    )
    session = Config(out="old", resume="auto", quiet=True, inject_delay="1:3", keep=9)
    assert resolve({}, {"out": "new"}, vars(session)) == Config(out="new", keep=9)
    with pytest.raises(UserError, match="prefetch true in mode sync"):
        resolve({}, {"prefetch": True}, {"mode": "sync"})


# Command lines, and what their error says.
REFUSED = """
--sevrers 2 | unknown option --sevrers, expected | did you mean '--servers'?
--learning-rate 2 | did you mean '--lr'
--batch_size 2 | unknown option --batch_size | '--batch-size'
--quiet=yes | option --quiet=yes, expected no value; write --quiet
--servers two | servers 'two', expected an integer >= 0; see --servers
--servers 1_0 | servers '1_0', expected an integer
--seed 999999999999999999999999999999 | expected an integer below 2**63
--lr 0 | lr 0.0, expected a number > 0
--lr nan | lr 'nan', expected a number > 0
--target-accuracy 96 | target_accuracy 96.0, expected a number in [0, 1]
--hidden 64, | hidden '64,', expected a list of integers >= 1
--mode asnc | unknown mode 'asnc', expected one of async,  | 'async'?
--problem mpl | unknown problem 'mpl' | path/file.py:Class | 'mlp'?
--problem net.py | unknown problem 'net.py' | path/file.py:Class
--groups *.bias | groups '*.bias', expected PATTERN: lr=X, weight_decay=X;
--link 1gbit | --link without --explain, expected --explain with it
--explain --rank 2 | unknown option --rank | did you mean '--ranks'?
--out \udcff | out '\\udcff', expected text
async | job file 'async', expected a path that ends in .toml | --help
a.toml b.toml | a second job file 'b.toml', expected only one
--servers 0 | servers 0 in mode async, expected mode sync or local_sgd; leave out --servers, or use
--mode ssp --far-read get | far_read 'get' in mode ssp, expected mode async or easgd
--mode sync --backup-workers 1 | backup_workers 1 without servers, expected both
--delay-adaptive | delay_compensation 0.0, expected delay_compensation > 0; set --delay-compen
--mode local_sgd --codec fp16 | codec 'fp16' with local_slots 'average', expected 'keep', or
--mode local_sgd --local-steps 50 --fragments 4 --local-slots keep | use --local-steps 48 or 52
--mode local_sgd --local-steps 2 --overlap-steps 3 --optimizer sgd | expected overlap_steps <= 2
--mode local_sgd --fragments 4 | fragments, overlap_steps or mixing with local_slots 'average',
--mode local_sgd --mixing 0 | mixing 0.0, expected a number in (0, 1]
--mode local_sgd --outer-nesterov | with outer_momentum 0.0, expected outer_momentum > 0
--delay-compensation 1 --prefetch | with prefetch true, expected prefetch false; a server has to
--server-ranks 1,2,1 | server_ranks [1, 2, 1], expected distinct ranks
--server-ranks 1,2 --servers 3 | servers 3 with 2 server_ranks, expected servers 2
--server-ranks 1 --server-hosts a* | with server_hosts 'a*', expected server_hosts ''
--epochs 0 | epochs 0 and steps 0, expected epochs >= 1 or steps >= 1
--schedule step | schedule 'step' with step_every 0, expected step_every >= 1
--mode sync --steps 9 --warmup-steps 9 | warmup_steps 9 with steps 9, expected warmup_steps < 9
--classes 1 | classes 1, expected an integer 0 or >= 2
--eval-only | eval_only without a checkpoint, expected --resume or --init-from
--eval-only --resume --quiet | eval_only and quiet without out, expected a place for the
--codec int8 --mode easgd | codec 'int8' in mode easgd, expected mode async or ssp or sync or
--codec int8 --mode sync --reduce allreduce | reduce 'allreduce', expected reduce 'auto' or 'shared'
--pull-codec fp16 --far-read get | with far_read 'get', expected far_read 'auto' or 'reply'; only an
--far-read get --read consistent | with read 'consistent', expected read 'relaxed'; a consistent
--prefetch --read consistent | prefetch true with read 'consistent', expected read 'relaxed'
--codec powersgd | codec 'powersgd' in mode async, expected mode sync
--codec powersgd --mode sync --servers 1 --backup-workers 1 | with backup_workers 1, expected backup
--codec powersgd --mode sync --pull-codec fp16 | pull_codec 'fp16', expected pull_codec 'none'
--epochs 3 --steps 9 | epochs 3 with steps 9, expected steps 0; leave out --epochs or --steps
--codec topk --topk-momentum 0.9 | with optimizer 'adam', expected optimizer 'sgd'; the servers'
--target-accuracy .9 --eval-every 0 | target_accuracy 0.9 with eval_every 0.0, expected eval_every >
--target-accuracy .9 --problem linear | target_accuracy 0.9 with problem 'linear'
--record | record true with read 'relaxed', expected read 'consistent'; what a torn read saw cannot
--mode hybrid --record --read consistent --on-death shrink | record true with on_death 'shrink'
--inject-delay 1:2,01:3 | inject_delay '1:2,01:3', expected distinct workers; name
--groups a*:lr=1,lr=2 | lr twice in groups, 'a*:lr=1,lr=2', expected once
--groups a*:lr=1e999 | group 'a*' with lr inf, expected a number >= 0
--eval-ema --ema 0.9 | eval_ema by itself, expected ema > 0 and evaluators >= 1
--eval-ema --evaluators 1 | eval_ema by itself, expected ema > 0 and evaluators >= 1
--ema 1 | ema 1.0, expected a number in [0, 1)
--dataset= | dataset '', expected a name or the path of a file
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_command_line_that_is_refused(line: str) -> None:
    argv, *parts = line.split(" | ")
    message = message_of(argv.split())
    assert all(part in message for part in parts), message
    assert message.isprintable()


FITTING = """
--server-hosts a* --servers 2
--server-hosts a*
--epochs 0 --eval-only --resume
--eval-only --init-from x --quiet --out y
--schedule step --step-every 9
--steps 9 --warmup-steps 30
--steps 9 --epochs 40
--problem mine.py:Net --hidden 9 --activation tanh
--problem softmax --hidden 128,64
--optimizer sgd --beta1 0.9
--mode sync --steps 9 --warmup-steps 8
--pull-codec auto --far-read get
--mode local_sgd --mixing 1 --reduce allreduce
--resume --init-from x
--eval-ema --ema 0.9 --evaluators 1
"""


@pytest.mark.parametrize("line", FITTING.strip().splitlines())
def test_fields_that_go_together(line: str) -> None:
    load(line.split())


OF_MODES = [name for name in NAMES if OPTIONS[name].modes]
MODES = OPTIONS["mode"].legal
COMPANIONS = {  # what an option has to come with
    "delay_adaptive": ["--delay-compensation", "0.5"],
    "outer_nesterov": ["--outer-momentum", "0.5"],
    "record": ["--read", "consistent"],
    "codec": ["--optimizer", "sgd"],  # without slots, which local_sgd would average
    "fragments": ["--optimizer", "sgd", "--local-steps", "5"],
    "overlap_steps": ["--optimizer", "sgd"],
    "mixing": ["--optimizer", "sgd"],
    "backup_workers": ["--servers", "1"],
    "powersgd_rank": ["--codec", "powersgd"],
    "scale_lr": ["--on-death", "shrink"],
}


def other_value(option: Option) -> Any:
    """Return a legal value that is not the default."""
    known = {bool: not option.default, int: 5, float: 0.5, tuple: (64, 64), str: "t.h5"}
    legal = [v for v in option.legal[::-1] if v != option.default and v not in option.only]
    return legal[0] if legal else known.get(option.kind)


def a_mode(option: Option, has: bool) -> str:
    """Return a mode that has an option, or one that does not."""
    return next(mode for mode in MODES if (mode in option.modes) == has)


def words_of(option: Option, value: Any) -> list[str]:
    """Return the command line's words for a value."""
    if option.kind is bool:
        return [option.flag if value else f"--no-{option.flag[2:]}"]
    return [option.flag, str(value)]


@pytest.mark.parametrize("name", OF_MODES)
def test_an_option_of_some_modes(name: str, tmp_path: Path) -> None:
    """Its own modes have it, others refuse it, except at its default."""
    option = OPTIONS[name]
    value, mode = other_value(option), a_mode(option, has=False)
    words, modes = words_of(option, value), " or ".join(option.modes)
    for own in option.modes:
        told = load(["--mode", own, *words, *COMPANIONS.get(name, [])])
        assert getattr(told, name) == value
    default = words_of(option, option.default) if option.default is not None else []
    assert getattr(load(["--mode", mode, *default]), name) == option.default
    remedy = f"leave out {words[0]}, or use --mode {modes}"
    expected = f"{name} {shown(value)} in mode {mode}, expected mode {modes}; {remedy}"
    job = job_file(tmp_path, tomli_w.dumps({"mode": mode, name: value}))
    assert message_of(["--mode", mode, *words]) == message_of([job]) == expected


@pytest.mark.parametrize("name", OF_MODES)
def test_a_change_of_mode_drops_what_it_leaves_behind(name: str, tmp_path: Path) -> None:
    """Of a job file or a saved run, but not what is given beside it."""
    option = OPTIONS[name]
    words, other = words_of(option, other_value(option)), a_mode(option, False)
    first = load(["--mode", a_mode(option, True), *words, *COMPANIONS.get(name, [])])
    job = job_file(tmp_path, to_toml(first))
    changed = Config(mode=other, servers=first.servers, optimizer=first.optimizer)
    saved = read_toml(job)
    assert load([job, "--mode", other]) == load(["--mode", other], saved) == changed
    assert load([job_file(tmp_path, f'mode = "{other}"', "other.toml")], saved) == changed
    assert load([], saved) == first
    assert "expected mode" in message_of([job, "--mode", other, *words])


def test_another_option_drops_what_it_leaves_without_effect(tmp_path: Path) -> None:
    """Of a job file or a saved run, but not what is given beside it."""
    job = job_file(tmp_path, 'optimizer = "adamw"\nbeta1 = 0.8\nhidden = [9]\nsteps = 7')
    assert load([job, "--optimizer", "sgd"]).beta1 == Config.beta1
    assert load([job, "--problem", "softmax"]).hidden == Config.hidden
    assert load([job, "--epochs", "3"]).steps == 0
    saved = {"schedule": "step", "step_every": 9, "steps": 7}
    assert load(["--schedule", "cosine"], saved) == Config(schedule="cosine", steps=7)
    assert load([job_file(tmp_path, 'schedule = "cosine"', "other.toml")], saved).step_every == 0
    assert "beta1 0.7 with" in message_of([job, "--optimizer", "sgd", "--beta1", "0.7"])
    assert "epochs 3 with steps 9" in message_of([job, "--epochs", "3", "--steps", "9"])
    odd = job_file(tmp_path, 'optimizer = "sgd"\nbeta1 = 0.8', "odd.toml")
    assert "beta1 0.8 with optimizer 'sgd', expected" in message_of([odd])
    assert load([odd, "--optimizer", "adam"]).beta1 == 0.8
    packed = job_file(tmp_path, 'codec = "topk"\ntopk_ratio = 0.1', "packed.toml")
    assert load([packed, "--mode", "easgd"]) == Config(mode="easgd")
    assert load([packed, "--codec", "int8"]) == Config(codec="int8")
    rounds = 'mode = "sync"\nservers = 0\ncodec = "powersgd"\npowersgd_rank = 2'
    few = job_file(tmp_path, rounds, "few.toml")  # values that fewer modes have
    assert (load([few]).servers, load([few]).codec) == (0, "powersgd")
    for words in ([few, "--mode", "ssp"], ["--mode", "ssp"]):
        assert load(words, read_toml(few)) == Config(mode="ssp")


def test_checkpoint_period() -> None:
    periods = {"60": (60.0, None), "5min": (300.0, None), "1.5h": (5400.0, None)}
    periods |= {"500steps": (None, 500), "0": (None, None), "0steps": (None, None)}
    for text, period in periods.items():
        assert load(["--checkpoint-every", text]).checkpoint_period == period


@pytest.mark.parametrize("name", LAYOUT_FIELDS)
def test_resume_refuses_another_layout(name: str) -> None:
    value = other_value(OPTIONS[name])
    with pytest.raises(UserError) as caught:
        check_resume(Config(), dataclasses.replace(Config(), **{name: value}))
    message = str(caught.value)
    assert message.startswith(f"{name} ")
    told = ("as in the saved run", OPTIONS[name].flag, shown(value), shown(getattr(Config(), name)))
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("data/a.h5::x,y", "a.h5::x,y", True),
        ("d/x.npy,d/y.npy", "x.npy,y.npy", True),
        ("/data,1/a.h5", "/scratch/a.h5", True),
        ("/data,1/a.h5,/data,1/b.h5", "/data,1/c.h5,/data,1/b.h5", False),
        ("d/a.h5,d/b.h5", "d/b.h5", False),
        ("a.h5::g/x,g/y", "a.h5::h/x,h/y", False),
        ("a.h5::x,y", "a.h5", False),
    ],
)
def test_moved_files_are_the_same_data(old: str, new: str, same: bool) -> None:
    with contextlib.nullcontext() if same else pytest.raises(UserError, match="dataset"):
        check_resume(Config(dataset=old), Config(dataset=new))


VALUES: dict[Any, tuple[Any, ...]] = {  # of each kind, as far as an option takes them
    bool: (True, False),
    int: (0, 1, 5, 2**63 - 1),
    float: (0.0, 5e-324, 0.1, 0.5, 1.0, sys.float_info.max),
    str: ("", 'a"b\\c\n\té\u2028', "7", "0:1.5,3:2", "ftrl: l1=1e-3", "*.b: lr=1e-05", "x.py:Net"),
    tuple: ((), (1, 2**62)),
}


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Of each option, to a job file and back, to the same type and value."""
    option, kept = OPTIONS[name], 0
    for value in (*option.legal, *VALUES[option.kind]):
        try:
            option.check(value)
        except UserError:
            continue
        text = to_toml(dataclasses.replace(Config(), **{name: value}))
        found = read_toml(job_file(tmp_path, text))[name]
        assert (found, type(found)) == (value, option.kind)
        kept += 1
    assert kept


def test_what_others_call_options_leads_there() -> None:
    """Each to its own option, by its words among others."""
    assert meant("learningRate", OPTIONS) == "did you mean 'lr'?"
    assert meant("every_n_epochs", OPTIONS) == "did you mean 'checkpoint_every'?"
    for option, others in called_elsewhere()["called"].items():
        for name in others.split():
            known = OPTIONS if option in OPTIONS else [option]
            assert meant(name, known) == f"did you mean {option!r}?", name
    assert meant("num_workers", OPTIONS).startswith("mpirun -n N")
    assert meant("nothing_like_it", OPTIONS) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave out --beta1 or --codec", "leave out beta1= or codec="),
        ("use --mode async or ssp, or leave", 'use mode="async" or "ssp", or leave'),
        ("--optimizer momentum or sgd", "optimizer=mpips.Momentum() or mpips.SGD()"),
        ("go on with --out runs/a --resume", 'go on with out="runs/a" resume=True'),
        ("add --record, leave out --no-shuffle", "add record=True, leave out shuffle=False"),
        ("docker: --shm-size, srun --mpi=pmi2", "docker: --shm-size, srun --mpi=pmi2"),
    ],
)
def test_programs_are_told_of_arguments(text: str, expected: str) -> None:
    assert in_python(text) == expected
    with reworded(in_python):
        assert str(UserError("x", "y", text)) == f"x, expected y; {expected}"
    assert str(UserError("x", "y", text)) == f"x, expected y; {text}"


def test_a_text_says_groups_and_groups_a_text() -> None:
    groups = Group("*.bias", weight_decay=0), Group("head.[ab] 1", 1e-5, np.float32(0.25))
    assert parse_groups("*.bias:weight_decay=0;head.[ab] 1: lr=1e-5 , weight_decay=.25") == groups
    assert text_of(groups) == "*.bias: weight_decay=0.0; head.[ab] 1: lr=1e-05, weight_decay=0.25"
    assert parse_groups(text_of(groups)) == groups
    assert parse_groups("") == ()
    with pytest.raises(UserError, match=r"groups with \{'params': 1\}"):
        text_of([{"params": 1}])  # type: ignore[list-item]


def test_an_array_is_of_the_first_group_that_matches() -> None:
    groups = Group("head.*", lr=1), Group("*.bias", lr=2), Group("none", lr=3)
    found = members(["a.bias", "head.bias", "a.weight", "head.weight"], groups)
    assert found == [["a.weight"], ["head.bias", "head.weight"], ["a.bias"], []]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("b",), "group 'b' without lr and weight_decay, expected one of them"),
        (("b", -1.0), "group 'b' with lr -1.0, expected a number >= 0"),
        (("b", None, float("nan")), "group 'b' with weight_decay nan"),
        (("b", "1"), "group 'b' with lr '1'"),
        (("a:b", 1.0), "group with the pattern 'a:b'"),
    ],
)
def test_what_no_group_is(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Group(*args)  # type: ignore[arg-type]


def test_workers_that_are_slowed() -> None:
    """Whole jobs: tests/matrix."""
    for text, found in (("", {}), ("3:1,0:2.5", {3: 1.0, 0: 2.5})):
        assert DELAYS.fullmatch(text)
        assert parse_delays(text) == found
        check_delays(found, 4)
    with pytest.raises(UserError, match="names worker 3, expected workers 0 to 2"):
        check_delays({0: 2.0, 3: 2.0}, 3)


def test_lingering_sleeps_and_lets_mpi_get_on() -> None:
    calls: list[float] = []
    start, computed = time.perf_counter(), time.thread_time()
    linger(0.1, lambda: calls.append(0.0))
    assert time.perf_counter() - start >= 0.1
    assert time.thread_time() - computed < 0.05, "it spins"
    assert len(calls) > 1
    calls.clear()
    linger(-1.0, lambda: calls.append(0.0))
    assert not calls


def test_words_of_a_job() -> None:
    lines = {"-n 4 -- --lr 1": ("-n 4", "--lr 1"), "-- a.py -- b": ("", "a.py -- b")}
    for line, (ours, job) in lines.items():
        assert split_words(line.split()) == (ours.split(), job.split())
    assert split_words(["-n", "4", "--"]) == (["-n", "4"], [])
    assert split_words(["-n", "4"]) == (["-n", "4"], None)
