"""Every command that README.md and docs/ show is run by a test: this one knows by which, and fails where there is none.

A new command in a page: have it run, and say here by whom.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from fencepost_dev.tools import MAIN_CLASSES
from fencepost_proxy.cli import main
from tests.support.docs import PAGES, ROOT, SHELL, blocks, commands, printed_commands

_DOCS: Final = "tests/integration/test_docs.py"
_SHIPPED: Final = "tests/integration/test_distribution.py"
_IMAGES: Final = "tests/integration/test_compose.py"
_FENCEPOST: Final = r"(\.venv/bin/|/opt/fencepost/bin/)?fencepost"

#: A command, whole, and the test by which it is run: as it stands there but for addresses, names and paths.
RUN_BY: Final = {
    r"kafka-(topics|configs)(\.sh)? .*": f"{_DOCS}::test_kafkas_own_tools_do_what_pages_say",
    r"kafka-(transactions|acls)\.sh .*": "tests/integration/test_remove.py::test_commands_of_the_page_remove_the_proxy",
    r"make demo": "tests/integration/test_demo.py::test_interrupted_demo_leaves_no_process_or_file",
    r"make (lint|test)": ".ci/run::make test",
    r"make bench.*": "tests/unit/test_benchmarks.py::test_workloads_match_patterns_and_quick_skips_longest",
    rf"{_FENCEPOST} (append|read|kafka-topics|kafka-configs) .*": f"{_DOCS}::test_readme_commands_append_and_refuse",
    r"fencepost load .*": "tests/integration/test_recipes.py::test_load_command_can_be_killed_anywhere",
    rf"{_FENCEPOST} dev": "tests/integration/test_dev_command.py::test_dev_reports_ready_and_stops_on_signal",
    rf"{_FENCEPOST} proxy( --(bootstrap-server|listen|status) \S+)+": f"{_SHIPPED}"
    "::test_proxy_from_wheel_checks_expected_offsets",
    rf"{_FENCEPOST} check --bootstrap-server \S+": "tests/integration/test_check.py::test_a_set_up_that_works",
    rf"{_FENCEPOST} verify-broker --bootstrap-server \S+": "tests/integration/test_verify_broker.py"
    "::test_results_are_those_of_the_page",
    rf"{_FENCEPOST} config explain --toml > \S+": "tests/unit/test_config.py"
    "::test_example_file_has_every_key_and_loads",
    r"fencepost config explain fencepost.require.key": "tests/unit/test_write_a_policy.py"
    "::test_one_field_one_file_and_one_line_add_a_policy",
    r"fencepost status": "tests/unit/test_cli_status.py::test_output_starts_with_the_health_line",
    r"fencepost topics": "tests/unit/test_cli_status.py::test_topics_and_the_partitions_of_one",
    r"fencepost expansions --status \S+": "tests/unit/test_cli_expansions.py::test_empty_expansion_status_is_stated",
    rf"{_FENCEPOST} transactions( .*)?": "tests/integration/test_stuck_transactions.py"
    "::test_hanging_transaction_is_shown_found_and_aborted",
    r"(source <\()?fencepost completion bash(\)| > \S+)": "tests/unit/test_cli_completion.py"
    "::test_bash_completes_commands_options_values_and_files",
    r"python3 -m venv \S+( && \. \S+/bin/activate)?": f"{_SHIPPED}::test_commands_run_where_nothing_else_is_installed",
    r"(/opt/fencepost/bin/)?pip install '\.\[proxy(,dev)?\]'": f"{_SHIPPED}"
    "::test_commands_run_where_nothing_else_is_installed",
    r"spark-submit (spark_jobs/)?bulk_load\.py .*": "tests/integration/test_spark.py"
    "::test_bulk_load_partitions_keys_like_kafka_in_order",
    r"spark-submit (spark_jobs/)?verify\.py .*": "tests/integration/test_spark.py"
    "::test_verify_detects_missing_duplicate_and_unknown_records",
    r"spark-submit --packages \S+ stream\.py .*": "tests/integration/test_spark.py"
    "::test_stream_with_sink_id_survives_lost_commit",
    r"docker-compose up -d|docker build .*|(FENCEPOST_BASE_IMAGE=\S+ )?deploy/docker/build-local\.sh": f"{_IMAGES}"
    "::test_clients_on_the_host_produce_and_consume",
    r"docker run .*": f"{_IMAGES}::test_image_runs_alone_with_minimal_rights",
    r"docker-compose --profile demo --profile direct up demo direct": f"{_IMAGES}"
    "::test_demo_is_refused_where_kafka_alone_loses_an_update",
    r"docker-compose run --rm spark .*": f"{_IMAGES}::test_every_spark_job_runs",
    r"export FENCEPOST_BOOTSTRAP_SERVER=.*": f"{_DOCS}::test_commands_of_the_docker_guide_run_without_docker",
    r"docker-compose down": f"{_IMAGES}::test_data_outlives_the_containers",
    r"curl localhost:18080/readyz": f"{_IMAGES}::test_the_status_page_is_on_the_loopback",
    r"\.venv/bin/python -m pytest -m docker": f"{_IMAGES}::pytest.mark.docker",
}

#: Commands that no test runs, because they change the machine or need a cluster, and what is tested instead.
NOT_RUN: Final = {
    r"install .*(fencepost\.service|/etc/fencepost)( .*)?": "writes to /etc; see tests/unit/test_deploy_systemd.py",
    r"docker-compose --profile monitoring up -d": "needs images of others; see tests/unit/test_deploy_images.py",
    r"systemctl .*": "needs systemd as init; the unit: tests/unit/test_deploy_systemd.py",
    r"kubectl .*": "needs a cluster; the manifests: tests/unit/test_deploy_kubernetes.py",
    r".*spark-submit --master (yarn|k8s).*": "needs a cluster; the jobs: tests/integration/test_spark.py",
    r"python -m venv env && .*venv-pack.*": "packs what the user has; the jobs: tests/integration/test_spark.py",
    r"pip install '\.\[spark,proxy,dev\]'": "half a gigabyte; its extra: tests/integration/test_distribution.py",
    r"unshare -n sh -c .*": "needs root; the rows: tests/unit/test_benchmarks.py",
    r"apt-get .*|debootstrap .*|tar -C base .*": "makes an image to begin with, as root",
    r"make \.venv/\.installed-(run|all)": "what make demo and make test do first",
}

COMMANDS: Final = tuple(commands())
SPANS: Final = re.compile(r"`(fencepost [a-z][^`\n]*)`")


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_states_its_language(page: Path) -> None:
    """Otherwise a command could be in a block that no test reads."""
    for block in blocks(page):
        assert block.language, f"{block.where}: write ```{SHELL} for commands, ```text for what they print"
        assert block.language not in ("bash", "shell", "console", "shell-session"), f"{block.where}: write ```{SHELL}"


def test_every_documented_command_has_a_runner() -> None:
    without_runner = {
        each.text: each.where
        for each in COMMANDS
        if sum(re.fullmatch(pattern, each.text) is not None for pattern in (*RUN_BY, *NOT_RUN)) != 1
    }
    assert not without_runner, "say in RUN_BY, once, by which test each is run"


def test_every_runner_pattern_matches_a_command() -> None:
    texts = [each.text for each in COMMANDS]
    idle = [pattern for pattern in (*RUN_BY, *NOT_RUN) if not any(re.fullmatch(pattern, text) for text in texts)]
    assert idle == []


@pytest.mark.parametrize("runner", sorted(set(RUN_BY.values())))
def test_named_runners_exist(runner: str) -> None:
    file, _, name = runner.partition("::")
    text = (ROOT / file).read_text("utf-8")
    assert (f"\ndef {name}(" if name.startswith("test_") else name) in text


def spans() -> list[tuple[str, str]]:
    """Commands within sentences and tables."""
    return [
        (f"{page.relative_to(ROOT)}", found[1]) for page in PAGES for found in SPANS.finditer(page.read_text("utf-8"))
    ]


def help_texts(parser: argparse.ArgumentParser | None = None) -> Iterator[str]:
    """Of `fencepost` and all its commands and subcommands."""
    parser = parser or main.command_parser()
    yield f"{parser.description or ''}\n{parser.epilog or ''}"
    for each in subcommands(parser).values():
        yield from help_texts(each)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


OURS: Final = sorted(
    {(each.where, each.text) for each in COMMANDS if re.match(_FENCEPOST + " ", each.text)}
    | set(spans())
    | {("help", each) for text in help_texts() for each in printed_commands(text) if each.startswith("fencepost ")}
)


@pytest.mark.parametrize(("where", "text"), OURS)
def test_our_commands_have_the_documented_options(where: str, text: str) -> None:
    """Values may be placeholders; commands, subcommands and options may not."""
    words = re.split(r" (?:>|\|) ", text)[0].split()[1:]
    if words[0].startswith("kafka-"):
        assert words[0] in MAIN_CLASSES
        return  # the options are the tool's
    parser = main.command_parser(words[0] if not words[0].startswith("-") else None)
    while (nested := subcommands(parser)) and words and not words[0].startswith("-"):
        if words[0] not in nested:
            break
        parser = nested[words.pop(0)]
    known = {option for action in parser._actions for option in action.option_strings}
    if nested and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        raise AssertionError(f"{where}: `{text}`: there is no command {words[0]}")
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{where}: `{text}`: there is no option {word}"


def test_options_are_those_that_there_are() -> None:
    """Of `make`, of our modules, and of Kafka's tools: their names."""
    from benchmarks import __main__ as benchmarks  # noqa: PLC0415 - it is long, and this test's alone

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for each in COMMANDS:
        words = shlex.split(each.text.replace("<(", "").replace(")", ""))
        if words[0] == "make" and not words[1].startswith("."):
            assert words[1] in targets, each
        if words[0].startswith("kafka-"):
            assert words[0].removesuffix(".sh") in MAIN_CLASSES, each
        if words[:3] == ["python", "-m", "benchmarks"]:
            benchmarks.command_parser().parse_args(words[3:])
