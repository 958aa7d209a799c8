"""transformers' model on the very tensors of ours: the same numbers in the same memory, another engine around them.

Knows both libraries' names for one shape, and that some of transformers' matrices lie the other way round. Refuses to
know families, and how either is run (`huggingface.py`).
"""

from collections.abc import Mapping
from typing import Any


def transformers_twin(tensors: dict[str, Any], config: Mapping[str, Any]) -> Any:
    """transformers' model that shares the weights of nanoserve's, copying none. `config` is a config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    theirs: Any = AutoConfig.for_model(**config)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        twin = make(theirs)
    twin.load_state_dict(_as_theirs(tensors, twin, theirs.tie_word_embeddings), assign=True)
    _compute_frequencies(twin, theirs)
    options: Any = GenerationConfig
    twin.generation_config = options(pad_token_id=0)
    return twin.eval().requires_grad_(False)


def _as_theirs(ours: dict[str, Any], twin: Any, is_tied: bool) -> dict[str, Any]:
    """Our tensors, or views of them, under the names and in the shapes of the twin's."""
    from transformers.pytorch_utils import Conv1D

    names = {module: f"{name}.weight" for name, module in twin.named_modules()}
    turned = {name: ours[name].T for module, name in names.items() if isinstance(module, Conv1D)}
    embedding, head = names[twin.get_input_embeddings()], names[twin.get_output_embeddings()]
    return ours | turned | ({head: ours[embedding]} if is_tied else {})


def _compute_frequencies(twin: Any, config: Any) -> None:
    """Rotary frequencies are the only numbers that no checkpoint holds: they were left out with everything else."""
    rotary = getattr(twin.model, "rotary_emb", None) if hasattr(twin, "model") else None
    if rotary is not None:
        twin.model.rotary_emb = type(rotary)(config).to(twin.get_input_embeddings().weight.device)
