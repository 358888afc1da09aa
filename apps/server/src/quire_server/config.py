"""The server's own settings. Flags carry vLLM's names where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Settings, at_least, between, one_of, setting

__all__ = ["MAX_PROMPTS", "ServerConfig", "complaint_about_key"]

MAX_PROMPTS = 1 << 14
"""Most prompts that a server may be set to take in one request."""


def complaint_about_key(key: Any) -> str | None:
    """What is wrong with an API key, None for one that is fine. Shows nothing of it."""
    if not isinstance(key, str) or not key.strip():
        return "is empty or blank"
    if key != key.strip():
        return "begins or ends with a space, which no header carries"
    if "," in key:
        return "holds a comma, which stands between keys"
    if any(ord(character) < 32 or ord(character) == 127 for character in key):
        return "holds a control character, which no header carries"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    return None


def _keys(keys: Any) -> str | None:
    if not isinstance(keys, (list, tuple)):
        return "be a list of keys"
    for position, key in enumerate(keys, 1):
        if (complaint := complaint_about_key(key)) is not None:
            return f"hold API keys only, but number {position} {complaint}"
    return None


def _not_empty(names: Any) -> str | None:
    return None if names and all(name.strip() for name in names) else "hold names that are not empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Settings):
    """Address, names, credentials and bounds of the HTTP server."""

    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 for every interface.")
    port: int = setting(8000, help="Port to listen on; 0 takes a free one.", check=between(0, 65535))
    uds: str | None = setting(None, help="Unix socket to listen on, instead of host and port.")
    grpc_port: int | None = setting(
        None,
        help="Serve gRPC, too, on this port of the host: the engine service that gateways such as smg call; 0 takes a "
        "free one. Needs the extra grpc.",
        check=between(0, 65535),
    )
    grpc_uds: str | None = setting(
        None, help="Serve gRPC, too, on this Unix socket; needs the extra grpc.", nonempty=True
    )
    api_server_count: int | None = setting(
        None,
        help="Processes that answer HTTP, in front of the engines: they share address, engines and figures. Empty: as "
        "many as this server has engines (data_parallel_size).",
        unit="processes",
        check=at_least(1),
    )
    ssl_certfile: str | None = setting(None, help="File with the certificate, as PEM; then the server speaks HTTPS.")
    ssl_keyfile: str | None = setting(None, help="File with its key, if it is not in the same file.")
    ssl_ca_certs: str | None = setting(None, help="File with the authorities that sign clients' certificates.")
    ssl_cert_reqs: int = setting(
        0,
        help="Whether clients need a certificate: 0 no, 1 it is checked if there is one, 2 yes.",
        check=one_of(0, 1, 2),
    )
    ssl_ciphers: str | None = setting(
        None, help="Ciphers of TLS up to 1.2, in OpenSSL's form, e.g. ECDHE+AESGCM; empty: OpenSSL's default."
    )
    enable_ssl_refresh: bool = setting(
        False, help="Read certificate, key and authorities again when their files change, for new connections."
    )
    served_model_name: tuple[str, ...] | None = setting(
        None,
        help="Model names that requests may use, of which answers show the first; empty: the model's own name.",
        check=_not_empty,
    )
    api_key: tuple[str, ...] = setting(
        (),
        help="Keys, one of which every request but the probes must carry; several are separated by commas. "
        "Better from QUIRE_API_KEY or --api-key-file: others see command lines.",
        check=_keys,
        secret=True,
        nonempty=True,
    )
    api_key_file: str | None = setting(
        None,
        help="YAML file with a line `name: key` for each caller, or `name: {key: KEY, admin: true}`.",
        nonempty=True,
    )
    admin_api_key: tuple[str, ...] = setting(
        (),
        help="Keys of administrators; alone they leave all other routes open to everybody.",
        check=_keys,
        secret=True,
        nonempty=True,
    )
    share_prefix_cache: bool = setting(
        False,
        help="Whether callers with different API keys share cached prefixes; then cached_tokens and the time of an "
        "answer tell whether somebody sent the same prompt.",
    )
    chat_template: str | None = setting(None, help="File with a chat template, or the template itself.")
    default_chat_template_kwargs: dict[str, Any] | None = setting(  # noqa: RUF009  (the default is None)
        None,
        help='Variables of the chat template for all requests, as JSON, e.g. {"enable_thinking": false}; '
        "chat_template_kwargs of a request come before them.",
    )
    trust_request_chat_template: bool = setting(
        False, help="Whether a request may bring its own chat template (it runs in a sandbox)."
    )
    enable_auto_tool_choice: bool = setting(
        True, help="Whether calls are looked for in answers that may but need not hold one (tool_choice auto)."
    )
    response_store: str | None = setting(
        None,
        help="Where responses are kept: a SQLite file, :memory:, none, or module:function of another store; "
        "empty takes a file in the user's state folder.",
    )
    response_store_ttl_s: float = setting(
        7 * 86400.0, help="Responses are forgotten after this time.", unit="seconds", check=at_least(1)
    )
    response_store_max_responses: int = setting(
        100_000,
        help="Most responses that are kept; above this, the oldest of the API key with the most are forgotten.",
        unit="responses",
        check=at_least(1),
    )
    files_dir: str | None = setting(
        None,
        help="Folder in which uploaded files (/v1/files) and results of batches (/v1/batches) are kept; without one "
        "the server has neither.",
        nonempty=True,
    )
    files_max_bytes: int = setting(
        1 << 30, help="Largest file that may be uploaded.", unit="bytes", check=between(1024, 1 << 50)
    )
    files_max_total_bytes: int = setting(
        16 << 30,
        help="Most bytes of all files together; those of one API key may be half of it, where there are several.",
        unit="bytes",
        check=between(1024, 1 << 60),
    )
    audio_max_bytes: int = setting(
        1 << 30,
        help="Largest recording that may be sent to be transcribed.",
        unit="bytes",
        check=between(1024, 1 << 50),
    )
    audio_max_seconds: float = setting(
        6 * 3600.0, help="Longest recording that is transcribed.", unit="seconds", check=at_least(1)
    )
    batch_max_requests: int = setting(50_000, help="Most lines of a batch.", unit="lines", check=between(1, 1 << 30))
    batch_max_concurrency: int = setting(
        32,
        help="Most lines of batches that run at the same time, while there are no other requests.",
        unit="lines",
        check=between(1, 1 << 16),
    )
    batch_busy_concurrency: int = setting(
        1,
        help="The same, while there are other requests, which lines of batches make way for.",
        unit="lines",
        check=between(0, 1 << 16),
    )
    enable_sleep_mode: bool = setting(
        False,
        help="Serve POST /sleep and /wake_up and GET /is_sleeping, which any client may then call, or with "
        "--admin-api-key administrators alone.",
    )
    enable_admin_routes: bool = setting(
        False,
        help="Serve POST /v1/load_lora_adapter, /v1/unload_lora_adapter, /pause, /resume, /reset_prefix_cache, "
        "/reset_encoder_cache, /reset_mm_cache and GET /is_paused, which any client may then call; with "
        "--admin-api-key administrators alone, but for adapters of a key's own.",
    )
    allowed_local_lora_path: str | None = setting(
        None, help="Folder below which requests may name adapters to load; empty allows none.", nonempty=True
    )
    allow_lora_from_hub: bool = setting(
        False, help="Whether requests may name adapters of the hub, which are downloaded then."
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, help="Serve GET /tokenizer_info, which shows the tokenizer's settings and the chat template."
    )
    enable_force_include_usage: bool = setting(
        False, help="End every stream with its usage, also where the request does not ask for it (stream_options)."
    )
    disable_fastapi_docs: bool = setting(False, help="Do not serve /openapi.json.")
    response_role: str = setting("assistant", help="Role of the messages that answer chats.", nonempty=True)
    fingerprint_mode: str = setting(
        "none",
        help="system_fingerprint of answers, which changes when an answer may: full has version, ranks and a hash of "
        "model and settings; hash leaves out the ranks; custom is fingerprint_value; none leaves it null.",
        check=one_of("none", "full", "hash", "custom"),
    )
    fingerprint_value: str | None = setting(None, help="What fingerprint_mode custom shows.", nonempty=True)
    sse_keep_alive_interval: float = setting(
        0.0,
        help="Longest silence of a stream: then it gets a comment, which keeps proxies from closing it, also while its "
        "request waits. 0 for none.",
        unit="seconds",
        check=at_least(0),
    )
    enable_per_request_metrics: bool = setting(
        False,
        help="Tell the times of a request in its answer (metrics, of a stream with its usage): chat completions and "
        "completions of one prompt and one choice.",
    )
    return_tokens_as_token_ids: bool = setting(
        False, help="Log probabilities name all tokens as token_id:ID, also where the request does not ask for it."
    )
    tokens_only: bool = setting(
        False,
        help="Serve the routes that take and answer token ids alone (/inference/v1/generate), and those for operators.",
    )
    mcp_servers: str | None = setting(
        None,
        help="File (JSON or YAML) with the MCP servers whose tools responses may use: mcpServers, a table from labels "
        "to entries with url and headers, or with command, args, env and cwd.",
    )
    mcp_timeout_s: float = setting(
        60.0, help="An MCP server that takes longer to answer has failed.", unit="seconds", check=at_least(0.01)
    )
    metrics_prefix: str = setting(
        "quire", help="Prefix of the metric names; vllm gives the names that existing dashboards use."
    )
    middleware: tuple[str, ...] = setting(
        (),
        help="Import paths of ASGI middleware around all routes: classes, or coroutine functions of a request and what "
        "answers it. They see requests before keys are checked.",
    )
    root_path: str = setting("", help="Path prefix under which a reverse proxy shows this server, e.g. /llm.")
    allowed_origins: tuple[str, ...] = setting(
        (),
        help="Web origins that may call this server from a browser, e.g. https://chat.example.org; * for all.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        help="Host names of this server besides its addresses, names without a dot and --host; *.example.org for those "
        "below, * for all. Others are refused on loopback addresses of a server without API keys, and everywhere if "
        "some are named here.",
    )
    allowed_methods: tuple[str, ...] = setting(("*",), help="Methods that they may use; * for all.")
    allowed_headers: tuple[str, ...] = setting(("*",), help="Headers that they may send; * for all.")
    allow_credentials: bool = setting(False, help="Whether browsers may send them their cookies and credentials.")
    max_body_bytes: int = setting(
        32 << 20, help="Largest request body; a larger one is refused unread.", unit="bytes", check=at_least(1024)
    )
    max_body_values: int = setting(
        500_000,
        help="Most JSON values in a request body, such as the ids of a prompt's tokens; parsing more would hold up all "
        "streams.",
        unit="values",
        check=at_least(1024),
    )
    max_body_objects: int = setting(
        100_000,
        help="Most lists and objects in a request body, such as messages, their parts and parts of tools' schemas.",
        unit="lists and objects",
        check=at_least(1024),
    )
    body_timeout_s: float = setting(
        120.0, help="A request body that takes longer to arrive is refused.", unit="seconds", check=at_least(0.01)
    )
    h11_max_incomplete_event_size: int = setting(
        1 << 16,
        help="Largest request line with headers; larger ones are refused unparsed.",
        unit="bytes",
        check=at_least(1024),
    )
    h11_max_header_count: int = setting(256, help="Most headers of a request.", unit="headers", check=at_least(16))
    header_timeout_s: float = setting(
        30.0,
        help="A connection whose request line and headers take longer to arrive is closed.",
        unit="seconds",
        check=at_least(0.01),
    )
    send_timeout_s: float = setting(
        120.0,
        help="A client that does not read its answer for so long is disconnected, and its request aborted.",
        unit="seconds",
        check=at_least(0.01),
    )
    timeout_keep_alive: int = setting(
        75, help="A connection without a request is closed after this time.", unit="seconds", check=at_least(1)
    )
    limit_concurrency: int = setting(
        4096,
        help="Most connections at a time. Those that wait for a request give way to new ones; requests beyond are "
        "answered with 503, but for health checks.",
        unit="connections",
        check=at_least(1),
    )
    max_prompts_per_request: int = setting(
        1024, help="Most prompts in one completion request.", unit="prompts", check=between(1, MAX_PROMPTS)
    )
    models_dir: str | None = setting(
        None,
        help="Folder with models (folders of checkpoints, GGUF files) to serve behind one address, each under the name "
        "of its folder or file: loaded when a request names it, in a process of its own; in place of MODEL.",
        nonempty=True,
    )
    models_max: int = setting(
        4,
        help="With --models-dir: most models that are loaded at a time, of which the one that was used the longest ago "
        "gives way; 0 for any number.",
        unit="models",
        check=at_least(0),
    )
    models_ttl_s: float = setting(
        300.0,
        help="With --models-dir: a model that no request has used for so long is unloaded, unless keep_alive of "
        "Ollama's requests says otherwise; 0 keeps it.",
        unit="seconds",
        check=at_least(0),
    )
    models_autoload: bool = setting(
        True, help="With --models-dir: whether requests load the model that they name; else POST /models/load does."
    )
    allow_pull: bool = setting(
        False,
        help="Whether POST /api/pull may download models of the Hugging Face hub into its cache, for administrators "
        "alone where some key is theirs.",
    )
    pooling_model: str | None = setting(
        None,
        help="Second model beside the served one, for embeddings, classes and scores: a folder or a name of the hub. "
        "Requests choose it by this name; pooling requests that name no model go to it, unless the served model pools.",
        nonempty=True,
    )
    io_processor_plugin: str | None = setting(
        None,
        help="Plug-in (entry point in quire.io_processors) that reads and answers POST /pooling for task plugin.",
        nonempty=True,
    )
    diarizer_plugin: str | None = setting(
        None,
        help="Plug-in (entry point in quire.diarizers) that tells speakers apart where a transcription is asked for as "
        "diarized_json.",
        nonempty=True,
    )
    banner: bool = setting(True, help="Print what was started, and why it was chosen so.", flag="--banner")
    drain_delay_s: float = setting(
        0.0,
        help="On SIGTERM, go on taking requests for this long while GET /ready already says no, so that load balancers "
        "have time to look elsewhere.",
        unit="seconds",
        check=at_least(0),
    )
    log_level: str = setting(
        "info",
        help="What is less urgent is not logged.",
        check=one_of("critical", "error", "warning", "info", "debug"),
    )
    log_format: str = setting(
        "text", help="text for people, or json for one object a line.", check=one_of("text", "json")
    )
    access_log: bool = setting(
        False,
        help="Log every request when it is answered: status, time, tokens; never its texts or its key. Probes and "
        "scrapes that went well are left out, but for --log-level debug.",
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (), help="Paths that the access log leaves out, e.g. /health,/metrics.", nonempty=True
    )
    log_config_file: str | None = setting(
        None,
        help="JSON file with a configuration of Python's logging (logging.config.dictConfig), which comes on top of "
        "log_level and log_format.",
        nonempty=True,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        help="Send traces of requests to this OpenTelemetry collector, e.g. http://localhost:4318; needs "
        "the extra otel.",
    )
    disable_log_stats: bool = setting(
        False, help="Do not log tokens a second, requests and the KV cache's usage while there is work."
    )
    log_stats_interval_s: float = setting(10.0, help="How often that is logged.", unit="seconds", check=at_least(0.1))
    uvicorn_log_level: str = setting(
        "warning",
        help="How much the HTTP server logs.",
        check=one_of("critical", "error", "warning", "info", "debug", "trace"),
    )
