"""docs/libraries.md: which library does what with an export, by the tests that ran it in environments made for it.

python tests/libraries.py [FOLDER] > docs/libraries.md    an hour of a small machine, and a package index

FOLDER keeps the environments. A row of the table is a row of ROWS: what several tests do, or refuse on purpose.
"""

import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = ["sacremoses", "spacy", "sentencepiece", "scikit-learn", "ipython", "pytest==9.2.0"]
# Of transformers the oldest and the newest that pyproject.toml allows, with libraries of their years.
ENVIRONMENTS = {
    "oldest": ["torch==2.6.0", "numpy<2", "transformers==4.57.0", "accelerate==1.1.1", "peft==0.15.2",
        "sentence-transformers==3.3.1", "onnx==1.17.0", "onnxruntime==1.20.1", "captum==0.7.0",
        "bertviz==1.4.0", "ipython==8.30.0", "minicons==0.3.19", "evaluate==0.4.3", "datasets==3.1.0",
        "pyarrow==18.1.0", "deepspeed==0.17.6"],
    "newest": ["torch==2.13.0", "numpy", "transformers==5.24.0", "accelerate==1.15.0", "peft==0.21.2",
        "sentence-transformers==6.2.0", "onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0",
        "captum==0.9.0", "bertviz==1.4.1", "minicons==0.3.39", "evaluate==0.4.6", "deepspeed==0.19.8"],
}  # fmt: skip
LIBRARIES = ["torch", "transformers", "accelerate", "peft", "sentence-transformers", "onnxruntime", "captum", "bertviz"]
LIBRARIES += ["minicons", "evaluate", "deepspeed"]
MODELING, HERE = "tests/test_modeling.py::test_", "tests/test_libraries.py::test_"
TOKENS = "tests/test_tokenization.py::test_"
# (library, what is done, its tests, what it means that they pass)
ROWS = [
    ("transformers", "Auto classes: model, masks, sequences, tokens, choices, spans", HERE + "auto_classes", "works"),
    ("transformers", "CausalLM, NextSentencePrediction, PreTraining", HERE + "heads_that_do_not_exist",
     "refused: all tokens see all; pre-training is MaskedLM"),
    ("transformers", "pipelines: fill-mask, text and token classification, features, zero-shot", HERE + "pipelines",
     "works"),
    ("transformers", "README.md and hugging-face.md, line by line", HERE + "the_page_s_code[transformers]",
     "works"),
    ("transformers", "inputs_embeds; padding on either side", MODELING + "vectors_in_place_of_ids", "works"),
    ("transformers", "output_attentions, in the call and in the config; attention_logits",
     MODELING + "attention_weights_and_the_two_parts_of_their_logits", "works"),
    ("transformers", "masks [batch, length]: integers, booleans, floats; an id of padding that is a token",
     MODELING + "the_mask_says_what_is_padding", "works"),
    ("transformers", "3-D and 4-D masks", MODELING + "masks_of_pairs_are_refused_in_a_line",
     "refused: all tokens see all"),
    ("transformers", "eager, sdpa; flash attention refused", HERE + "attention_implementations", "works"),
    ("transformers", "gradient checkpointing", HERE + "gradient_checkpointing", "works"),
    ("transformers", "added tokens, save, load, shards: folders keep all code", HERE + "saved_folders_hold_all_code",
     "works"),
    ("transformers", "float16, bfloat16, float64, device_map, low_cpu_mem_usage", HERE + "precisions_and_places",
     "works"),
    ("transformers", "every encoding by its name: made, saved, loaded", HERE + "every_scheme_of_the_folder", "works"),
    ("transformers", "tokeniser: offsets, word_ids, char_to_token", TOKENS + "every_piece_knows_its_place", "works"),
    ("transformers", "tokeniser: windows with stride", TOKENS + "windows_with_stride_hold_the_whole_text", "works"),
    ("transformers", "tokeniser: text that is split into words", TOKENS + "given_words_keep_their_numbers", "works"),
    ("transformers", "tokeniser: copied, pickled, tokens added, saved", TOKENS + "copies_and_added_tokens", "works"),
    ("transformers", "DataCollatorForLanguageModeling, whole words", TOKENS + "whole_words_are_masked", "works"),
    ("transformers", "Trainer: masks, accumulation, bfloat16, resume", HERE + "trainer", "works"),
    ("torch", "torch.compile, fullgraph in the first call", MODELING + "compiled_code_is_one_graph", "works"),
    ("torch", "torch.export, other lengths", MODELING + "exported_programs_have_any_length", "works"),
    ("torch", "jit.trace, other lengths, every encoding", MODELING + "traced_code_has_any_length", "works"),
    ("torch", "quantize_dynamic", MODELING + "linear_weights_become_int8", "works, see the page"),
    ("torch", "FSDP2, two processes, every encoding", MODELING + "shards_have_the_same_gradients[fsdp]", "works"),
    ("deepspeed", "ZeRO-3, two processes, every encoding", MODELING + "shards_have_the_same_gradients[zero]", "works"),
    ("accelerate", "init_empty_weights, load_checkpoint_and_dispatch", MODELING + "loading_into_a_model_without_memory",
     "works"),
    ("accelerate", "disk offload, every encoding", MODELING + "weights_that_come_from_a_disk", "works"),
    ("accelerate", "disk offload of a folder, by device_map", HERE + "accelerate_offloads_to_a_disk", "works"),
    ("peft", "LoRA, DoRA, IA3 on every projection; merged", MODELING + "adapters_train", "works"),
    ("peft", "save, AutoPeftModel", HERE + "peft_saves_and_loads", "works"),
    ("peft", "prompt tuning", MODELING + "prompts_are_tuned", "works"),
    ("peft", "an adapter of the tied embedding", MODELING + "an_adapter_of_the_tied_embedding", "warns"),
    ("sentence-transformers", "encode, train, save, load; CrossEncoder", HERE + "sentence_transformers", "works"),
    ("onnxruntime", "torch.onnx.export, other lengths", MODELING + "onnx_has_any_length", "works"),
    ("captum", "integrated gradients: layer, inputs_embeds, configurable embedding", MODELING + "captum", "works"),
    ("bertviz", "head_view of the weights' two parts", HERE + "the_page_s_code[bertviz]", "works"),
    ("minicons", "MaskedLMScorer: the sum that this project has", HERE + "the_page_s_code[minicons]", "works"),
    ("evaluate", "evaluator with a pipeline", HERE + "evaluate", "works"),
]  # fmt: skip
INTRODUCTION = """# Libraries around transformers

What tests do with a folder of `tupe checkpoint export` or with the models themselves, without fairseq: the output of
`python tests/libraries.py`. How each library is used: [If you know Hugging Face](hugging-face.md).

"""


def environment(name: str, folder: Path) -> Path:
    """The Python of an environment, which is made unless the folder has it."""
    packages, place = ENVIRONMENTS[name], folder / name
    if not (place / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [place / "bin/python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, packages[0]], check=True)  # first, so that nothing else brings another one
        subprocess.run([*pip, *packages, *TEXT], check=True, stdout=sys.stderr, env={**os.environ, "DS_BUILD_OPS": "0"})
        (place / "done").touch()
    return place / "bin/python"


def outcomes(python: Path) -> dict[str, str]:
    """{test: "", or why it failed or was skipped}, of the tests of all rows."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"PYTHONPATH": str(ROOT), "HF_HOME": folder, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        settings |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_MODULES_CACHE": f"{folder}/modules"}
        settings |= {"TORCH_EXTENSIONS_DIR": f"{folder}/extensions", "PATH": f"{python.parent}:{os.environ['PATH']}"}
        files = sorted({test.partition("::")[0] for _, _, test, _ in ROWS})
        words = [python, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", f"--junitxml={folder}/report.xml"]
        subprocess.run([*words, *files], cwd=ROOT, env={**os.environ, **settings}, stdout=sys.stderr, check=False)
        cases = ET.parse(f"{folder}/report.xml").getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": verdict(case) for case in cases}


def verdict(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            message = found.get("message").splitlines()[0]
            return message if kind == "skipped" else f"fails: {message[:80]}"
    return ""


def cell(test: str, passed: str, results: dict[str, str]) -> str:
    """Of the tests whose names begin so; a skipped one counts where all are."""
    begin = test.removesuffix("]").replace(".py", "").replace("/", ".")
    found = [result for name, result in results.items() if name.startswith(begin)]
    bad = [result for result in found if result.startswith("fails")]
    return bad[0] if bad else passed if "" in found else found[0] if found else "was not run"


def page(folder: Path) -> str:
    pythons = [environment(name, folder) for name in ENVIRONMENTS]
    script = f"from importlib.metadata import version; print(*map(version, {LIBRARIES}))"
    versions = [dict(zip(LIBRARIES, subprocess.check_output([python, "-c", script], text=True).split(), strict=True))
                for python in pythons]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(outcomes, pythons))
    lines = [f"Run on {datetime.date.today()}, on a CPU.", "", "| library | what | oldest | newest |"]
    lines.append("|---|---|---|---|")
    for library, what, test, passed in ROWS:
        cells = [f"{v[library]}: {cell(test, passed, r)}" for v, r in zip(versions, results, strict=True)]
        lines.append("| " + " | ".join([library, what, *cells]) + " |")
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(page(Path(sys.argv[1] if sys.argv[1:] else temporary)), end="")
