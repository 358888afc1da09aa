"""The commands for people at a terminal. Only argparse is imported until one of them runs."""

from __future__ import annotations

from quire_server.commands import JSON, MODEL, ParsedCommand, argument, command, server_sections

__all__: list[str] = []

SYSTEM = argument("--system-prompt", metavar="TEXT", help="system prompt")
SET = argument(
    "--set",
    action="append",
    default=[],
    metavar="NAME=VALUE",
    help="sampling parameter, e.g. temperature=0.2; repeatable",
)
IMAGE = argument(
    "--image",
    action="append",
    default=[],
    metavar="PATH",
    help="image of the first message, also an address; repeatable",
)
PLAIN = argument("--plain", action="store_true", help="no Markdown and no colours (also NO_COLOR=1)")
STATS = argument("--stats", action="store_true", help="tokens, time to the first and tokens per second of each answer")
URL = argument(
    "--url", default="http://127.0.0.1:8000/v1", help="the server's address (default: http://127.0.0.1:8000/v1)"
)
MODEL_NAME = argument("--model-name", metavar="NAME", help="model to ask (default: the server's first)")
API_KEY = argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
TIMEOUT = argument(
    "--timeout", type=float, default=600.0, metavar="SECONDS", help="how long the server may say nothing (default: 600)"
)
MODELS_DIR = argument("--models-dir", metavar="FOLDER", help="a folder of models, as of quire serve")
CACHE_DIR = argument(
    "--cache-dir", metavar="FOLDER", help="the hub's cache (default: HF_HUB_CACHE, or where HF_HOME says)"
)


@command(
    "run",
    "serve a model for yourself and chat with it, or answer a prompt; the server goes when you go",
    "[MODEL] [PROMPT] [--flag value ...]",
    MODEL,
    argument("PROMPT", nargs="?", help="answer this and leave; text that is piped in goes behind it"),
    SYSTEM,
    SET,
    IMAGE,
    PLAIN,
    STATS,
    sections=server_sections,
)
def run_run(parsed: ParsedCommand) -> int:
    from quire_server.terminal.run import RunOptions, run

    args = parsed.args
    options = RunOptions(args.PROMPT, args.system_prompt, args.set, args.image, args.plain, args.stats)
    return run(parsed.engine_config(), parsed.sections["server"], parsed.origins, options)


@command(
    "chat",
    "chat with a running server, any that speaks the OpenAI API",
    "[--url URL] [-q MESSAGE]",
    URL,
    MODEL_NAME,
    API_KEY,
    SYSTEM,
    argument("-q", "--quick", metavar="MESSAGE", help="answer this and leave; so is text that is piped in"),
    SET,
    IMAGE,
    PLAIN,
    STATS,
    TIMEOUT,
)
def run_chat(parsed: ParsedCommand) -> int:
    from quire_server.terminal.chat import ChatOptions, chat

    args = parsed.args
    return chat(
        ChatOptions(
            args.url, args.model_name, args.api_key, args.system_prompt, args.quick, args.set, args.image, args.plain,
            args.stats, args.timeout,
        )
    )  # fmt: skip


@command(
    "complete",
    "have a running server go on with a text, without a chat template",
    "[--url URL] [-q PROMPT]",
    URL,
    MODEL_NAME,
    API_KEY,
    argument("--max-tokens", metavar="N", help="most tokens of an answer (default: the server's)"),
    argument("-q", "--quick", metavar="PROMPT", help="go on with this and leave; so is text that is piped in"),
    SET,
    STATS,
    TIMEOUT,
)
def run_complete(parsed: ParsedCommand) -> int:
    from quire_interfaces import ConfigError
    from quire_server.terminal.api_client import APIClient
    from quire_server.terminal.chat import complete, parsed_parameters, piped_input

    args = parsed.args
    limits = [] if args.max_tokens is None else [f"max_tokens={args.max_tokens}"]
    parameters = parsed_parameters([*limits, *args.set])
    client = APIClient(args.url, args.api_key, timeout_s=args.timeout)
    prompt = args.quick if args.quick is not None else piped_input()
    if prompt == "":
        raise ConfigError("the prompt is empty", field="quick")
    return complete(client, args.model_name, prompt, parameters, shows_stats=args.stats)


@command(
    "list",
    "list the models on this machine: the hub's cache, and a folder of models",
    "[--models-dir FOLDER] [--json]",
    MODELS_DIR,
    CACHE_DIR,
    JSON,
)
def run_list(parsed: ParsedCommand) -> int:
    from quire_server.terminal.model_commands import print_list

    args = parsed.args
    return print_list(args.models_dir, args.cache_dir, as_json=args.as_json)


@command(
    "pull",
    "download a model of the Hugging Face hub",
    "NAME [--revision NAME] [--models-dir FOLDER]",
    argument("NAME", help="owner/name on the hub, with :Q4_K_M for one of several GGUF files"),
    argument("--revision", metavar="NAME", help="branch, tag or commit"),
    argument("--models-dir", metavar="FOLDER", help="put it there under its own name (default: the hub's cache)"),
)
def run_pull(parsed: ParsedCommand) -> int:
    from quire_server.terminal.local_models import pull

    args = parsed.args
    print(pull(args.NAME, args.revision, args.models_dir))
    return 0


@command(
    "rm",
    "remove models from the hub's cache, or from a folder of models",
    "NAME[@REVISION] ... [--yes] [--models-dir FOLDER]",
    argument("NAME", nargs="+", help="as quire list shows it; @ and a branch or commit for that revision alone"),
    argument("-y", "--yes", action="store_true", help="without asking"),
    MODELS_DIR,
    CACHE_DIR,
)
def run_rm(parsed: ParsedCommand) -> int:
    from quire_server.terminal.model_commands import remove

    args = parsed.args
    return remove(args.NAME, args.models_dir, args.cache_dir, asks=not args.yes)


@command(
    "show",
    "say what a model on this machine is: sizes, context, parameters, sampling defaults",
    "[MODEL] [--template] [--json]",
    MODEL,
    argument("--template", action="store_true", help="print its chat template"),
    MODELS_DIR,
    CACHE_DIR,
    JSON,
)
def run_show(parsed: ParsedCommand) -> int:
    from quire_server.terminal.model_commands import show

    args = parsed.args
    return show(args.MODEL, args.models_dir, args.cache_dir, template=args.template, as_json=args.as_json)


@command(
    "launch",
    "serve a part of the server: render renders and tokenizes, without an engine",
    "render [MODEL] [--flag value ...]",
    argument("COMPONENT", choices=["render"], help="render: the render, derender and tokenize routes"),
    MODEL,
    sections=server_sections,
)
def run_launch(parsed: ParsedCommand) -> int:
    from quire_server.render_only import launch_render

    return launch_render(parsed.engine_config(), parsed.sections["server"])


@command(
    "collect-env",
    "say what a report of a problem should: versions, processor, memory, kernels, GPU, settings; no secrets",
    "[--json]",
    JSON,
)
def run_collect_env(parsed: ParsedCommand) -> int:
    from quire_server.terminal.collect_env import print_environment

    return print_environment(as_json=parsed.args.as_json)


@command(
    "transcribe",
    "write down what is said in recordings, with a server of your own or a running one",
    "FILE... [--format FORMAT] [--output-dir FOLDER] [--model MODEL | --url URL] [--flag value ...]",
    argument("FILES", nargs="+", metavar="FILE", help="recording in any container that FFmpeg reads"),
    argument(
        "--format",
        choices=("text", "srt", "vtt", "json", "verbose_json"),
        default="text",
        dest="form",
        help="text, srt, vtt, json or verbose_json (default: text)",
    ),
    argument("--output-dir", metavar="FOLDER", help="write FOLDER/NAME.txt, .srt, ... (default: to standard output)"),
    argument("--language", metavar="CODE", help="spoken language, e.g. en (default: it is heard)"),
    argument("--translate", action="store_true", help="write English, whatever is spoken"),
    argument("--prompt", metavar="TEXT", help="what was said before: names and spellings"),
    argument(
        "--word-timestamps", action="store_true", help="times of words: cues in srt, marks in vtt, a list in json"
    ),
    argument("--vad", action="store_true", help="leave silence out before the model hears it"),
    argument("--url", metavar="URL", help="a running server (default: one of your own, which goes when you go)"),
    MODEL_NAME,
    argument("--url-api-key", metavar="KEY", help="key of the running server (default: OPENAI_API_KEY)"),
    TIMEOUT,
    argument("--quiet", action="store_true", help="no progress"),
    sections=server_sections,
)
def run_transcribe(parsed: ParsedCommand) -> int:
    from quire_server.terminal.transcribe import TranscribeOptions, transcribe

    args = parsed.args
    options = TranscribeOptions(
        args.FILES, args.form, args.output_dir, args.language, args.translate, args.prompt, args.word_timestamps,
        args.vad, args.url, args.model_name, args.url_api_key, args.timeout, args.quiet,
    )  # fmt: skip
    return transcribe(parsed.engine_config(), parsed.sections["server"], parsed.origins, options)
