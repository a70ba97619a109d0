"""An Engine under the `deepspeed` launcher with the views of it that DeepSpeed's own functions offer, which gather over the
ranks: masters, parameters, moments, all as flat fragments of the whole model.
"""

import deepspeed
import torch
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import distributed
from transformers import DeepseekV3Config, Gemma4TextConfig, MixtralConfig, Qwen3MoeConfig

from diloco_ds import config
from diloco_ds.core.fragments import balance
from diloco_ds.core.portions import Portions
from diloco_ds.island.engine import Engine, connect
from diloco_ds.model.build import build_model, tensor_specs, travelling_parameters
from diloco_ds.model.experts import expert_modules
from diloco_ds.model.initial import write_initial_weights

VOCABULARY, LENGTH, EXPERTS = 101, 17, 4

SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA = {
    "global_head_dim": 10,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
ROUTED = {"hidden_size": 24, "num_experts_per_tok": 2, "output_router_logits": True}
MOE_WIDTH = 16  # a grouped matrix product wants rows of whole 16 bytes
MODELS = {
    "gemma4": lambda: Gemma4TextConfig(**SIZES, **GEMMA, hidden_size=21),
    "gemma4-moe": lambda: Gemma4TextConfig(
        **SIZES,
        **GEMMA,
        hidden_size=24,
        enable_moe_block=True,
        num_experts=EXPERTS,
        top_k_experts=2,
        moe_intermediate_size=MOE_WIDTH,
    ),
    "mixtral": lambda: MixtralConfig(
        **{**SIZES, "intermediate_size": MOE_WIDTH}, **ROUTED, num_local_experts=EXPERTS
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 3, "head_dim": 4},
        **{**ROUTED, "output_router_logits": False},  # it has no loss that balances the load
        num_local_experts=EXPERTS,
        moe_intermediate_size=MOE_WIDTH,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, **ROUTED, num_experts=EXPERTS, moe_intermediate_size=MOE_WIDTH
    ),
}


def small_model(name, seed=1):
    """Odd sizes that no two ranks divide evenly, a tied embedding (Gemma) and a frozen tensor."""
    model = build_model(MODELS[name](), seed)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    return model


def layout_of(model):
    return balance(tensor_specs(model), fragments=4, period=4)


def flat(tensors, layout):
    """Every fragment of the named tensors."""
    return [
        torch.cat([tensors[placed.spec.name].detach().flatten() for placed in layout.tensors_of(index)])
        for index in range(layout.fragments)
    ]


def initial_weights(model, path):
    """Written by rank 0, as a run directory has them."""
    connect()
    if distributed.get_rank() == 0 and not path.exists():
        write_initial_weights(model, path)
    distributed.barrier()
    return path


class Island:
    """One rank of the island that a case of test_engine.py describes."""

    def __init__(self, case, directory, seed=1):
        self.model = small_model(case["model"], seed)
        self.layout = layout_of(self.model)
        self.expert_tensors = [
            f"{name}.{tensor}"
            for name, module in expert_modules(self.model).items()
            for tensor, _ in module.named_parameters()
        ]
        self.divided = case["deepspeed"].get("expert_parallel", {}).get("autoep_size", 1)
        trainer = config.Trainer(
            loss_chunk=11,
            activation_checkpointing=case["activation_checkpointing"],
            compile=case["compiled"],
        )
        initial = initial_weights(self.model, directory / f"init-{case['model']}-{seed}")
        counts = "routed" in case.get("checks", ())
        self.engine = Engine.start(initial, case["deepspeed"], trainer, self.layout, 0, counts)
        self.model = self.engine._engine.module.model
        self.parameters = travelling_parameters(self.model)
        self.optimizer = self.engine._engine.optimizer
        self.directory = directory
        self.batches = torch.Generator().manual_seed(self.engine.rank)

    def train(self, lr=1.0, steps=1):
        self.engine.set_lr(lr)
        for _ in range(steps):
            self.engine.step(self.batch())
        return self.engine.finished_steps(wait=True)

    def batch(self):
        rows = self.engine.micro_batch * self.engine.grad_accumulation
        return torch.randint(VOCABULARY, (rows, LENGTH), generator=self.batches)

    def written(self):
        """Every fragment as the ranks write it together into shared memory."""
        return self.together(self.engine.write_fragment, "fragment", self.layout.numels)

    def given(self):
        """Every portion of the moments, likewise."""
        portions = Portions(self.layout.numels)
        return self.together(self.engine.write_moments, "portion", [portions.numel] * portions.count)

    def given_moments(self):
        """The moments in these portions, as `moments` has them."""
        values = torch.stack(self.given()).unflatten(1, (2, -1)).transpose(0, 1).flatten(1)
        return [
            part
            for value in values
            for part in value[: sum(self.layout.numels)].split(list(self.layout.numels))
        ]

    def together(self, write, name, numels):
        paths = [self.directory / f"{name}{index}" for index in range(len(numels))]
        if self.engine.rank == 0:  # from_file writes into a file that it must make larger: not in a race
            for path, numel in zip(paths, numels, strict=True):
                path.write_bytes(bytes(4 * numel))
        self.engine.least([0])
        shared = [
            torch.from_file(str(path), shared=True, size=numel)
            for path, numel in zip(paths, numels, strict=True)
        ]
        for index, out in enumerate(shared):
            assert write(index, out).done()
        self.engine.least([0])
        return [each.clone() for each in shared]

    def masters(self):
        return self.flat(self.master)

    def copies(self):
        return self.flat(self.copy)

    def moments(self):
        first = self.flat(lambda parameter: self.moment(parameter, "exp_avg"))
        return first + self.flat(lambda parameter: self.moment(parameter, "exp_avg_sq"))

    def flat(self, view):
        whole = {name: self.whole(name, view(parameter)) for name, parameter in self.parameters.items()}
        return flat(whole, self.layout)

    def whole(self, name, value):
        """Of a tensor whose experts are divided, the experts of all ranks."""
        if self.divided == 1 or name not in self.expert_tensors:
            return value
        parts = [torch.empty_like(value) for _ in range(self.divided)]
        group = groups._get_expert_parallel_group(f"ep_size_{self.divided}")
        distributed.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts)

    def master(self, parameter):
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            return safe_get_full_fp32_param(parameter).clone()
        return self.unsharded(parameter).detach().clone()

    def moment(self, parameter, key):
        if hasattr(parameter, "_hp_mapping"):
            # DeepSpeed links the moments after the step of the first group, when those of experts are not there yet.
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            return safe_get_full_optimizer_state(parameter, key).clone()
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        return base.state[self.unsharded(parameter)][key].clone()

    def unsharded(self, parameter):
        """ZeRO-0: the tensor that the basic optimizer updates for it."""
        for group, masters in zip(
            getattr(self.optimizer, "fp16_groups", []),
            getattr(self.optimizer, "fp32_groups", []),
            strict=True,
        ):
            for low, master in zip(group, masters, strict=True):
                if low is parameter:
                    return master
        return parameter

    def copy(self, parameter):
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach().clone()

    def adopt(self, sources, how, alpha=0.0, snapshots=None):
        for index, source in enumerate(sources):
            snapshot = None if snapshots is None else snapshots[index]
            assert self.engine.adopt_fragment(index, source, how, alpha, snapshot).done()


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rounded(fragments, like):
    return [fragment.to(copy.dtype) for fragment, copy in zip(fragments, like, strict=True)]


def noise(seed, layout):
    """Fragments that bf16 cannot hold exactly, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(numel, generator=generator) for numel in layout.numels]


def in_place(island, sources):
    """Whether masters and the copies of all ranks hold `sources`."""
    copies = island.copies()
    return equal(island.masters(), sources) and equal(copies, rounded(sources, copies))
