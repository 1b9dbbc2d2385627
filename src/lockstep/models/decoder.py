"""One decoder for the trainer and the embedded engine, over its ops alone.

# T tokens  D model width  N trained tokens  V vocabulary  P rows of padding  K head width
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.models.adapter_rows import AdapterRows
from lockstep.models.attention import Attention, RopeTables, norm_scale, rope_tables
from lockstep.models.config import ModelConfig, NormWeights
from lockstep.models.latent_attention import LatentAttention
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.linear_attention import LinearAttention
from lockstep.models.lora_config import LoraShape
from lockstep.models.moe import MLP, MoE, Routing
from lockstep.ops.base import Context, Ops
from lockstep.ops.context import PackedContext, Support, take_rows
from lockstep.ops.head import chunk_rows
from lockstep.ops.split import SplitContext

Tensor = torch.Tensor


class Block(nn.Module):
    """Attention and MLP. Each adds its output to the residual stream, with a norm before it or
    after it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm_weights: NormWeights = config.norm_weights
        is_before, is_after = config.norms != "after", config.norms != "before"

        def norm(is_there: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.ones(config.hidden_size)) if is_there else None

        self.input_norm = norm(is_before)
        self.attention: Attention | LatentAttention | LinearAttention
        if layer not in config.attention_layers:
            self.attention = LinearAttention(config, layer)
        elif config.latent is not None:
            self.attention = LatentAttention(config, config.latent, layer)
        else:
            self.attention = Attention(config, layer)
        self.attention_output_norm = norm(is_after)
        self.post_attention_norm = norm(is_before)
        self.is_routed = layer in config.routed_layers
        if self.is_routed:
            self.mlp = MoE(config, config.routed_layers.index(layer))
        else:
            self.mlp = MLP(config)
        self.mlp_output_norm = norm(is_after)

    def forward(
        self, x_TD: Tensor, at: LayerInputs, *, is_recomputed: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """(stream [T, D], this layer's entry of `Routing.prob_sums`, if any). is_recomputed: keep x
        alone for backward, and run the block again there."""
        if is_recomputed:
            # Runs within the module's hooks, so FSDP gathers the weights once for both runs.
            # The reentrant kind runs first without gradient: ops may then take another path with
            # other bits.
            return checkpoint(self._run, x_TD, at, use_reentrant=False, preserve_rng_state=False)
        return self._run(x_TD, at)

    def _run(self, x_TD: Tensor, at: LayerInputs) -> tuple[Tensor, list[Tensor]]:
        around_attention = self.input_norm, self.attention_output_norm
        around_mlp = self.post_attention_norm, self.mlp_output_norm
        before, after, before_mlp, after_mlp = (
            None if weight is None else norm_scale(weight, self.norm_weights)
            for weight in (*around_attention, *around_mlp)
        )
        x_TD = self.attention(x_TD, at, before, after)
        if not self.is_routed:
            return self.mlp(x_TD, at, eps=self.eps, norm=before_mlp, output_norm=after_mlp), []
        ops, routing = at.ops, at.routing
        out_TD = x_TD if before_mlp is None else ops.rms_norm(x_TD, before_mlp, self.eps)
        out_TD = self.mlp(out_TD, at)
        # Handed out, not kept in `routing`: FSDP copies inputs with gradient, and hooks outputs.
        sums: list[Tensor] = []
        if routing is not None:
            sums, routing.prob_sums = routing.prob_sums, []
        out_TD = out_TD if after_mlp is None else ops.rms_norm(out_TD, after_mlp, self.eps)
        return x_TD + out_TD, sums


class Decoder(nn.Module):
    """Maps ids and positions to final hidden states. Stateless: keys come from the context.

    The engine: `hidden = decoder(ids, positions, context)`, then `decoder.logits(hidden)`. The
    trainer: `decoder.score(ids, positions, context, predictors_N=..., targets_N=...)`. Made on its
    config's shapes with random weights; `load_checkpoint` fills them.

    ops: what every number is computed by; None is stock torch. `ops` may be replaced between two
    forwards. Decoders in one process may hold different ones.
    """

    def __init__(self, config: ModelConfig, *, ops: Ops | None = None) -> None:
        super().__init__()
        self.config = config
        self.ops = ops or Ops()
        self.embedding = nn.Parameter(torch.empty(config.num_rows, config.hidden_size))
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        shape = (config.num_rows, config.hidden_size)
        self.untied_head = None if config.tie_embeddings else nn.Parameter(torch.empty(shape))
        self.lora: LoraShape | None = None
        """Shape of the adapter that `lora.add_adapter` has added; all other weights are frozen
        then."""
        self.recomputes_blocks = False
        """Activation checkpointing: forward keeps only the input of each block, and backward runs
        the block again. The same bits, in less memory."""
        self._rope_tables: RopeTables | None = None
        self.init_weights()

    @property
    def head(self) -> Tensor:
        """[V + P, D]: the output projection; the embedding itself if tied."""
        return self.embedding if self.untied_head is None else self.untied_head

    def init_weights(self, *, std: float = 0.02, seed: int | None = None) -> None:
        """Draws normal weights; norms scale by 1, biases and sinks are 0. Does nothing on the meta
        device."""
        if self.embedding.is_meta:
            return  # drawing would import torch's compiler: 1.2 s and 100 MB
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("dt_bias", "value_norm")):
                    parameter.fill_(1.0)
                elif name.endswith("A_log"):
                    parameter.uniform_(1.0, 16.0, generator=generator).log_()
                elif name.endswith("norm"):
                    parameter.fill_(float(self.config.norm_weights != "centered"))
                elif name.endswith(("bias", "sinks")):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, std, generator=generator)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: Context,
        routing: Routing | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """ids, positions [T] int64 -> [T, D] normed hidden states in the compute dtype.

        routing: experts to replay; records the experts that were chosen. adapters: of the tokens,
        in place of the decoder's own; for a forward without a gradient.
        """
        c, ops = self.config, self.ops
        rotary = [[x.index_select(0, positions_T) for x in table] for table in self.rope_tables]
        of_kinds = [LayerInputs(ops, context, cos, sin, routing, adapters) for cos, sin in rotary]
        x_TD = torch.nn.functional.embedding(ids_T, self.embedding)
        if c.embedding_scale != 1:
            x_TD = x_TD * float(torch.tensor(c.embedding_scale, dtype=x_TD.dtype))
        is_recomputed = self.recomputes_blocks and torch.is_grad_enabled()
        prob_sums: list[Tensor] = []
        for block, window in zip(self.layers, c.windows, strict=True):
            at = of_kinds[0 if window is None else -1]
            x_TD, sums = block(x_TD, at, is_recomputed=is_recomputed)
            prob_sums += sums
        if routing is not None:
            routing.prob_sums = prob_sums
        final_norm = norm_scale(self.final_norm, c.norm_weights)
        return ops.rms_norm(x_TD, final_norm, c.rms_norm_eps)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V] in the compute dtype; a sampler draws from them."""
        return self.ops.linear(hidden_TD, self.head)[..., : self.config.vocab_size]

    def score(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: PackedContext | SplitContext,
        *,
        predictors_N: Tensor,
        targets_N: Tensor,
        temperature: float = 1.0,
        support: Support | None = None,
        routing: Routing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy), each [N] float32, of targets [N]; each is predicted at its place of
        predictors [N] among the T. The one call that a trainer makes."""
        hidden_TD = self(ids_T, positions_T, context, routing)
        return self.log_probs(
            take_rows(hidden_TD, predictors_N), targets_N, temperature=temperature, support=support
        )

    def log_probs(
        self,
        hidden_TD: Tensor,
        ids_T: Tensor,
        *,
        temperature: float = 1.0,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-prob of ids [T] or [T, K], entropy [T]), float32: `Ops.log_probs` over this
        head."""
        return self.ops.log_probs(
            hidden_TD,
            self.head,
            ids_T,
            temperature=temperature,
            support=support,
            vocab_size=self.config.vocab_size,
        )

    def top_log_probs(
        self, hidden_TD: Tensor, top_k: int, *, vocab_size: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(ids [T, K] int64, log-probs [T, K] float32) of the likeliest `top_k` ids below
        `vocab_size`, of the distribution over all ids. No gradient."""
        ids = torch.empty(len(hidden_TD), top_k, dtype=torch.int64, device=hidden_TD.device)
        logprobs = torch.empty(len(hidden_TD), top_k, device=hidden_TD.device)
        size = chunk_rows(len(self.head), hidden_TD.device)
        for begin in range(0, len(hidden_TD), size):
            part = slice(begin, begin + size)
            logp = self.ops.log_softmax(self.logits(hidden_TD[part]), temperature=temperature)
            logprobs[part], ids[part] = logp[:, :vocab_size].topk(top_k)
        return ids, logprobs

    @property
    def rope_tables(self) -> RopeTables:
        """The result of `attention.rope_tables`, made once per device."""
        tables = self._rope_tables
        if tables is None or tables[0][0].device != self.embedding.device:
            with torch.inference_mode(False):  # the engine may be first, the trainer reads it too
                tables = self._rope_tables = rope_tables(self.config, self.embedding.device)
        return tables

    @rope_tables.setter
    def rope_tables(self, tables: RopeTables) -> None:
        self._rope_tables = tables
