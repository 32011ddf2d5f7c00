"""`import tupe.hf`: transformers' Auto classes, in a process of their own, since they never forget a registration."""

import json

import pytest
from test_house import ROOT, run

from tupe.checkpoints.export import AUTO

pytest.importorskip("transformers")
ASK = """
import json, sys, torch, transformers
import tupe.hf
out = {}
for folder in sys.argv[1:]:
    fill = transformers.pipeline("fill-mask", folder)
    out[folder] = [type(fill.model).__module__, type(fill.tokenizer).__module__, fill("a <mask> .")[0]["token_str"]]
config = transformers.AutoConfig.from_pretrained(folder)
for auto in %s:
    model = getattr(transformers, auto).from_config(config)
    out[auto] = type(model).__name__
print(json.dumps(out))
"""


@pytest.mark.thorough
def test_folders_need_no_code_where_the_package_is_installed():
    folders = sorted(str(path) for path in (ROOT / "models").glob("*"))
    out = json.loads(run(ASK % list(AUTO.values()), *folders).splitlines()[-1])
    assert len(folders) == 2
    for folder in folders:
        model, tokenizer, word = out[folder]
        assert (model, tokenizer) == ("tupe.modeling_tupe", "tupe.tokenization_tupe") and word
    assert {auto: out[auto] for auto in AUTO.values()} == {auto: name for name, auto in AUTO.items()}
