"""What the doctor finds, on this machine as it is and as it might be."""

import json
import subprocess
import sys

import pytest

from laconic import registry
from laconic.commands.console import OUT
from laconic.commands.doctor import Finding, check_engine, check_processor, examine, find_conflicts
from laconic.commands.tables import print_findings
from laconic.hardware import Machine


@pytest.fixture
def findings(tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    return {finding.name: finding for finding in examine()}


def with_features(*features):
    return check_processor(Machine(processor="CPU", cores=1, features=features, memory=1, system="Linux")).found


def test_it_looks_at_everything_laconic_depends_upon_says_what_to_try_and_makes_no_cache(findings, tmp_path):
    wanted = {
        "laconic",
        "python",
        "processor",
        "cores",
        "memory",
        "openvino",
        "onnxruntime",
        "compress",
        "serve",
        "cache",
    }
    assert wanted <= set(findings)
    assert "fake" not in findings
    assert [finding for finding in findings.values() if not finding.works and not finding.remedy] == []
    (content,) = [json.loads(finding.model_dump_json(by_alias=True)) for finding in [findings["cache"]]]
    assert set(content) == {"name", "works", "found", "try"}
    assert findings["cache"].found.startswith(str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_an_engine_for_gpus_that_is_not_installed_says_what_to_install(findings):
    if findings["onnxruntime-cuda"].works:
        pytest.skip("this build of onnxruntime has the CUDA provider")
    assert "laconic[gpu]" in findings["onnxruntime-cuda"].remedy


def test_a_cache_that_cannot_be_written_is_found(monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", "/proc/laconic")
    (found,) = [finding for finding in examine() if finding.name == "cache"]
    assert not found.works
    assert "LACONIC_CACHE" in found.remedy


def test_the_processor_is_read_for_what_it_means():
    assert "INT8 is fast" in with_features("avx2", "avx512_vnni")
    assert "BF16 is fast" in with_features("avx2", "amx_bf16")
    assert "saturate" in with_features("avx2")
    assert "saturate" not in with_features("avx2", "avx_vnni")
    assert "quantize.weights" in with_features()


def test_an_engine_that_is_absent_says_how_to_get_it(tmp_path):
    code = (
        "import sys, json; sys.modules['openvino'] = None; from laconic.commands.doctor import check_engine;"
        "print(check_engine('openvino').model_dump_json(by_alias=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["works"] is False
    assert found["try"] == "pip install 'laconic[cpu]'"


def test_an_engine_that_is_not_installed_or_broken_says_why_with_one_full_stop(tmp_path, monkeypatch, capsys):
    (tmp_path / "absent_engine.py").write_text("import libfoo")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.RUNTIMES, "absent", "absent_engine:Engine")
    monkeypatch.setattr(OUT, "width", 200)
    broken = Finding(name="broken", works=False, found="RuntimeError: there is no kernel.", remedy="pip install it")
    print_findings([check_engine("absent"), broken])
    absent, other = capsys.readouterr().out.splitlines()
    assert absent.endswith("package 'libfoo' is required and not installed. Try: pip install libfoo")
    assert other.endswith("there is no kernel. Try: pip install it")
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('libfoo.so.3 is of another world')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.RUNTIMES, "broken", "broken_engine:Engine")
    found = check_engine("broken")
    assert not found.works
    assert "libfoo.so.3 is of another world" in found.found


def test_two_wheels_that_own_one_module_are_a_conflict(tmp_path, monkeypatch):
    assert list(find_conflicts()) == []
    wheel = tmp_path / "onnxruntime_gpu-1.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = find_conflicts()
    assert not found.works
    assert "overwrite each other" in found.found


def test_torch_is_looked_for_and_not_loaded():
    code = (
        "import sys; from laconic.commands.doctor import examine; examine();"
        "assert not {'torch', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)
