"""Modules of the workspace import downwards: no circles, and imports inside functions have a reason."""

from __future__ import annotations

from pathlib import Path

from import_graph import (
    FLOORS,
    LEFT_OUT,
    PAGE,
    PICTURE,
    ROOT,
    Import,
    all_imports,
    drawing,
    find_circle,
    imports_in,
    module_paths,
    package_edges,
    picture,
    with_drawing,
)

LOCAL_IMPORTS = {
    "quire.checkpoint_notes": "a format that most starts do not read",
    "quire.adapters": "loads torch; the demo model is optional",
    "quire.async_llm": "engines of other hosts are rare; few servers hear, each in one way",
    "quire.assemble": "loads torch; the demo model is optional",
    "quire.parallel.collective_rpc": "loads torch",
    "quire.kernel_builds": "loads torch",
    "quire.plan": "what goes with hidden states in files, and the memory of several ranks, where these are asked for",
    "quire.speech.methods": "loads numpy",
    "quire_renderers.prompt_encodings": "readers of tokenizers that few folders have",
    "quire_renderers.tokenizer_loading": "readers of tokenizers that few folders have",
    "quire.speech.chunks": "loads numpy",
    "quire.draft_plan": "the demo model is optional",
    "quire.engine_report": "loads torch",
    "quire.parallel.expert_parallel": "loads torch",
    "quire.kernel_list": "loads torch",
    "quire.kv_tier": "loads torch",
    "quire.mm_encoder_only": "loads torch",
    "quire.pooling.calls": "loads torch",
    "quire.pooling.parts": "loads torch",
    "quire.worker": "loads torch",
    "quire_bench.cli": "a command loads what it needs",
    "quire_bench.comparison_setup": "gguf is an extra",
    "quire_bench.programs.run_quire": "the package may be missing where it runs",
    "quire_bench.programs.run_quire_embed": "the package may be missing where it runs",
    "quire_bench.programs.run_quire_server": "the package may be missing where it runs",
    "quire_bench.programs.run_quire_speech": "the package may be missing where it runs",
    "quire_bench.programs.run_quire_vision": "the package may be missing where it runs",
    "quire_bench.serving_flags": "a command loads what it needs",
    "quire_kernels_cuda.attention_backends": "needs Triton",
    "quire_kernels_cuda.ops": "needs Triton",
    "quire_kernels_cuda.tuning": "needs Triton",
    "quire_kernels_cuda.tuning_cases": "needs Triton",
    "quire_kernels_rocm.ops": "needs Triton",
    "quire_models.checkpoint_files": "formats that most starts do not read",
    "quire_models.compilation": "loads torch and transformers",
    "quire_models.hub": "formats that most starts do not read",
    "quire_models.stored_linears": "a format that most starts do not read",
    "quire_runner.runner": "drafters that are networks, where one drafts",
    "quire_scheduler.rules": "bounds of steps by time, where one is set",
    "quire_server.app": "needs the extra otel",
    "quire_server.cli": "a command loads what it needs",
    "quire_server.command_line": "a command loads what it needs",
    "quire_server.grpc_service.calls": "needs the extra otel",
    "quire_server.help_text": "a command loads what it needs",
    "quire_server.commands": "a command loads what it needs",
    "quire_server.mcp_servers": "needs the extra mcp",
    "quire_server.speech.live": "loads numpy",
    "quire_server.speech.service": "loads numpy",
    "quire_server.serve": "loads while the engine loads in its own process",
    "quire_server.terminal.collect_env": "loads torch",
    "quire_server.terminal.commands": "a command loads what it needs",
    "quire_structured_output.backends": "a library is loaded by whoever chose it",
    "quire_structured_output.text_grammar": "needs llguidance",
    "quire_testkit.parity.cli": "a command loads what it needs",
}
"""Module that imports others of the workspace inside functions -> why."""


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_circle(all_imports()) == []


def test_imports_inside_functions_have_a_reason() -> None:
    importers = {each.importer for each in all_imports() if each.is_local}
    assert importers - LOCAL_IMPORTS.keys() == set(), "import at the top of the module, or say here why not"
    assert LOCAL_IMPORTS.keys() - importers == set(), "these import nothing inside functions any more"


def test_the_drawing_is_of_today() -> None:
    page = PAGE.read_text()
    edges = package_edges(all_imports())
    assert page == with_drawing(page, drawing(edges)), "run `python tests/import_graph.py`"
    assert PICTURE.read_text() == picture(edges), "run `python tests/import_graph.py`"
    assert "mermaid" not in page, "no drawing that a browser fetches a program for"


def test_every_package_is_drawn_or_left_out() -> None:
    drawn = {package for packages in FLOORS.values() for package in packages}
    assert {module.split(".")[0] for module in module_paths()} - {"quire_docs"} == drawn | LEFT_OUT


def test_benchmarks_import_downwards() -> None:
    """A benchmark of a package imports what that package may import; what needs more stands in apps/bench."""
    upper = {name: Path() for name in (*FLOORS["On top"], *LEFT_OUT, "quire_engine")}
    imports = []
    for path in [*ROOT.glob("packages/*/benchmarks/*.py"), *ROOT.glob("kernels-*/benchmarks/*.py")]:
        package = f"quire_{path.parents[1].name}".replace("-", "_")
        roots = [
            each._replace(imported=each.imported.partition(".")[0])
            for each in imports_in(
                f"{path.parents[1].name}/{path.name}", path.read_text("utf-8"), upper.keys() | module_paths().keys()
            )
        ]
        imports += [each for each in roots if each.imported in upper and each.imported != package]
    assert imports == []


def test_a_circle_is_found_through_functions_and_types() -> None:
    modules = {"a", "a.b", "c"}
    imports = [
        *imports_in("a", "def f():\n    from c import x\n", modules),
        *imports_in("c", "if TYPE_CHECKING:\n    from a import b\n", modules),
        *imports_in("a.b", "import a\n", modules),
    ]
    assert imports == [Import("a", "c", 2, True), Import("c", "a.b", 2, False), Import("a.b", "a", 1, False)]
    circle = find_circle(imports)
    assert circle[0] == circle[-1]
    assert set(circle) == {"a", "a.b", "c"}
    assert find_circle(imports[:2]) == []


def test_edges_through_others_are_left_out() -> None:
    imports = [Import("a.x", "b", 1, False), Import("b", "c", 1, False), Import("a", "c.y", 1, False)]
    assert package_edges(imports) == {"a": {"b"}, "b": {"c"}}
