"""What is gathered at once: the blocks that are named, declared or repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import PrepareError
from drivetrain.strategies.units import Units, find_units, repeated_blocks

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


BLOCK_SIZE = (WIDTH + 1) * 2 * WIDTH + (2 * WIDTH + 1) * WIDTH


class Other(Block):
    pass


class Outer(nn.Module):
    """A block with a list of blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x


class Raw(nn.Module):
    """A block whose parameter is its own, without a layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Quiet(nn.Module):
    """A block without a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Holder(nn.Module):
    """A block that only holds others: whoever uses it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()


class Model(nn.Module):
    """Anything, with a layer before it and one behind it."""

    def __init__(self, body: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.body = body
        for name, module in others.items():
            self.add_module(name, module)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.body(self.before(x)))


def blocks(count: int = 3, kind: Callable[[], nn.Module] = Block) -> list[nn.Module]:
    return [kind() for _ in range(count)]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def counts(units: Units) -> dict[str, int]:
    return dict(Counter(type(module).__name__ for module in units.modules))


# Repeated


@pytest.mark.parametrize(
    "body",
    [
        nn.ModuleList(blocks()),
        nn.Sequential(*blocks()),
        nn.ModuleDict({"a": Block(), "b": Block(), "c": Block()}),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.ReLU(), Block(), nn.Dropout(), Block()),
        nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleDict({"x": Block(), "y": Block()})]),
        nn.ModuleList([nn.ModuleList([nn.ModuleList([Block()])]), Block(), Block()]),
        nn.Sequential(nn.Sequential(Block(), Block()), Block()),
    ],
    ids=["list", "sequential", "dict", "among-layers", "lists-in-a-list", "deeper-lists", "sequential-in-sequential"],
)
def test_units_when_blocks_are_repeated_in_a_list_then_are_those(body: nn.Module) -> None:
    units = find_units(Model(body), [])
    assert counts(units) == {"Block": 3}
    assert str(units) == "3 x Block (repeated blocks)"


def test_units_when_a_list_is_the_model_then_are_its_blocks() -> None:
    assert counts(find_units(nn.Sequential(*blocks()), [])) == {"Block": 3}


def test_units_when_two_lists_hold_blocks_then_are_those_of_both() -> None:
    model = Model(nn.ModuleList(blocks(2)), decoder=nn.ModuleList(blocks(3, Other)))
    assert counts(find_units(model, [])) == {"Block": 2, "Other": 3}


def test_units_when_a_block_of_a_repeated_class_stands_alone_then_is_one_too() -> None:
    assert counts(find_units(Model(nn.ModuleList(blocks(3)), last=Block()), [])) == {"Block": 4}


@pytest.mark.parametrize("number", [0, 2])
def test_units_when_repeated_blocks_hold_repeated_blocks_then_are_the_outer_ones(number: int) -> None:
    model = Model(nn.ModuleList(blocks(2, Outer)), last=nn.ModuleList(blocks(number)))
    assert counts(find_units(model, [])) == {"Outer": 2} | ({"Block": number} if number else {})


def test_units_when_a_block_has_only_parameters_of_its_own_then_is_a_block() -> None:
    assert counts(find_units(Model(nn.ModuleList(blocks(3, Raw))), [])) == {"Raw": 3}


def test_units_when_blocks_are_sequences_then_other_sequences_are_none() -> None:
    body = nn.Sequential(nn.Sequential(nn.Dropout()), layers(), layers())
    units = find_units(Model(body, head=layers()), [])
    assert units.modules == (body[2], body[1])


def test_units_when_they_only_hold_blocks_then_are_what_they_hold() -> None:
    # Without a forward of its own nothing would gather a unit.
    assert counts(find_units(Model(nn.ModuleList(blocks(2, Holder))), [])) == {"Block": 2}


def test_units_when_one_block_stands_twice_then_count_it_once() -> None:
    block = Block()
    assert counts(find_units(Model(nn.ModuleList([block, block])), [])) == {}
    assert counts(find_units(Model(nn.ModuleList([block, block, Block()])), [])) == {"Block": 2}
    assert counts(find_units(Model(nn.ModuleList([nn.ModuleList([block]), nn.ModuleList([block])])), [])) == {}
    two = blocks(2)
    assert counts(find_units(Model(nn.ModuleList(two), again=nn.Sequential(*two)), [])) == {"Block": 2}


def test_units_when_the_model_is_of_the_class_of_its_blocks_then_it_is_no_unit_of_itself() -> None:
    tree, *branches = blocks(3, Outer)
    assert isinstance(tree, Outer)
    tree.inner = nn.ModuleList(branches)
    assert counts(find_units(tree, [])) == {"Outer": 2}


@pytest.mark.parametrize(
    "body",
    [
        nn.Linear(WIDTH, WIDTH),
        Block(),
        nn.Sequential(*[layer for _ in range(3) for layer in layers()]),
        nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        nn.ModuleList(blocks(3, Quiet)),
        nn.ModuleList([Block(), Other()]),
    ],
    ids=["layer", "block", "plain-layers", "list-of-layers", "no-parameters", "one-of-each"],
)
def test_units_when_no_block_is_repeated_then_the_model_is_one_unit_and_it_is_said(body: nn.Module) -> None:
    # A single layer is no block: a unit costs messages at every pass, and a plain stack may be of any size. Its
    # layers become units by name.
    units = find_units(Model(body), [])
    assert str(units) == "none (no block is repeated: the whole model is gathered at once)"


# Named


def test_units_when_classes_are_named_then_are_those_inner_ones_first() -> None:
    model = Model(nn.ModuleList(blocks(2, Outer)))
    units = find_units(model, ["Outer", "Block"])
    assert counts(units) == {"Outer": 2, "Block": 4}
    places = {module: place for place, module in enumerate(units.modules)}
    for outer in (model.body[0], model.body[1]):  # type: ignore[index]
        assert all(places[block] < places[outer] for block in outer.inner)
    assert units.reason == "named in the settings"


def test_units_when_a_layer_is_named_then_every_one_is_a_unit() -> None:
    model = Model(nn.Sequential(*[layer for _ in range(3) for layer in layers()]))
    assert counts(find_units(model, ["Linear"])) == {"Linear": 5}


def test_units_when_the_model_is_of_the_class_named_then_it_is_no_unit_of_itself() -> None:
    inner = Block()
    model = Block()
    model.first = inner  # type: ignore[assignment]
    assert find_units(model, ["Block"]).modules == (inner,)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("block", "did you mean Block? Or leave the class out, and the repeated blocks are taken"),
        ("Blok", "did you mean Block? Or leave the class out, and the repeated blocks are taken"),
        ("Oter", "did you mean Other? Or leave the class out, and the repeated blocks are taken"),
        ("Linera", "did you mean Linear? Or leave the class out, and the repeated blocks are taken"),
        ("Qqqqq", "name one of these, or leave the class out, and the repeated blocks are taken"),
        ("Quiet", "name one of these, or leave the class out, and the repeated blocks are taken"),
        ("ModuleList", "name one of these, or leave the class out, and the repeated blocks are taken"),
        ("Model", "name one of these, or leave the class out, and the repeated blocks are taken"),
    ],
)
def test_units_when_nothing_is_of_a_class_named_then_the_error_lists_the_repeated_blocks(name: str, hint: str) -> None:
    model = Model(nn.ModuleList(blocks(4)), decoder=nn.ModuleList(blocks(2, Other)), quiet=Quiet())
    with pytest.raises(PrepareError) as caught:
        find_units(model, ["Block", name] if name != "block" else [name])
    assert str(caught.value) == (
        f"Model has no module of class {name} to shard by; repeated in it:\n"
        f"  4 x Block, {BLOCK_SIZE} parameters each\n"
        f"  2 x Other, {BLOCK_SIZE} parameters each\n"
        f"  hint: {hint}"
    )


def test_units_when_nothing_is_repeated_and_the_name_is_wrong_then_the_error_says_so() -> None:
    with pytest.raises(PrepareError) as caught:
        find_units(Model(Quiet()), ["Encoder", "Decoder"])
    assert str(caught.value) == (
        "Model has no module of class Encoder, Decoder to shard by; nothing is repeated in it\n"
        "  hint: leave the class out, and the model is one unit"
    )


def test_repeated_blocks_when_there_are_some_then_counts_and_sizes_are_those_of_the_lists() -> None:
    model = Model(nn.ModuleList(blocks(2, Outer)), last=nn.ModuleList(blocks(3)))
    assert repeated_blocks(model) == {"Outer": (2, 2 * BLOCK_SIZE), "Block": (3, BLOCK_SIZE)}


# Declared


def test_units_when_the_model_declares_classes_then_are_those() -> None:
    model = Model(nn.ModuleList(blocks(3)), single=Other())
    model._no_split_modules = ["Other", "NotThere"]  # type: ignore[assignment]
    assert str(find_units(model, [])) == "1 x Other (declared by the model)"
    model._no_split_modules = ["NotThere"]  # type: ignore[assignment]
    assert str(find_units(model, [])) == "3 x Block (repeated blocks)"


def test_units_when_a_model_within_declares_classes_then_are_those() -> None:
    inner = Model(nn.ModuleList(blocks(3)), single=Other())
    inner._no_split_modules = {"Other"}  # type: ignore[assignment]
    assert str(find_units(Model(inner), [])) == "1 x Other (declared by the model)"


def test_units_when_a_found_one_shares_a_weight_with_the_rest_then_is_left_to_the_rest() -> None:
    model = Model(nn.ModuleList(blocks(3)), head=nn.Linear(2 * WIDTH, WIDTH))
    model.body[2].second.weight = model.head.weight  # type: ignore[index,union-attr]
    units = find_units(model, [])
    assert units.modules == (model.body[1], model.body[0])  # type: ignore[index]
    assert units.reason == "repeated blocks; not Block, which shares weights"
    # What was asked for is not changed: whoever shards by it says what is wrong.
    assert len(find_units(model, ["Block"]).modules) == 3


def test_units_when_one_shares_with_another_that_is_left_to_the_rest_then_both_are() -> None:
    model = Model(nn.ModuleList(blocks(3)), head=nn.Linear(2 * WIDTH, WIDTH))
    model.body[2].second.weight = model.head.weight  # type: ignore[index,union-attr]
    model.body[1].first.weight = model.body[2].first.weight  # type: ignore[index,union-attr]
    assert find_units(model, []).modules == (model.body[0],)  # type: ignore[index]


# Models of Transformers


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=1))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SMALL))


def bert_with_a_tied_head() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=3, num_heads=2, vocab_size=16)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    size = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return ViTModel(ViTConfig(**size, image_size=8, patch_size=4))


SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 16,
}


@pytest.mark.parametrize(
    ("build", "expected", "repeated"),
    [
        (llama, {"LlamaDecoderLayer": 3}, {"LlamaDecoderLayer": 3}),
        (gpt2, {"GPT2Block": 3}, {"GPT2Block": 3}),
        (bert, {"BertLayer": 3, "BertEmbeddings": 1}, {"BertLayer": 3}),
        (bert_with_a_tied_head, {"BertLayer": 3}, {"BertLayer": 3}),
        (t5, {"T5Block": 5}, {"T5Block": 5}),
        (vit, {"ViTLayer": 3, "ViTEmbeddings": 1}, {"ViTLayer": 3}),
    ],
)
def test_units_when_transformers_made_the_model_then_are_its_layers(
    build: Callable[[], nn.Module], expected: dict[str, int], repeated: dict[str, int]
) -> None:
    model = build()
    units = find_units(model, [])
    assert counts(units) == expected
    assert units.reason.startswith("declared by the model")
    assert {name: count for name, (count, _) in repeated_blocks(model).items()} == repeated


def test_units_when_the_class_of_a_llama_is_misspelled_then_the_error_has_the_right_one() -> None:
    model = llama()
    layer = model.model.layers[0]  # type: ignore[union-attr,index]
    size = sum(parameter.numel() for parameter in layer.parameters())  # type: ignore[union-attr]
    with pytest.raises(PrepareError) as caught:
        find_units(model, ["LLaMADecoderLayer"])
    assert str(caught.value) == (
        "LlamaForCausalLM has no module of class LLaMADecoderLayer to shard by; repeated in it:\n"
        f"  3 x LlamaDecoderLayer, {size:,} parameters each\n"
        "  hint: did you mean LlamaDecoderLayer? Or leave the class out, and the repeated blocks are taken"
    )
