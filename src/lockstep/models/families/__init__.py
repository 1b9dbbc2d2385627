"""The families of models that the decoder runs, a file for each; they register themselves."""

from lockstep.models.families import deepseek_v3 as deepseek_v3
from lockstep.models.families import gemma3 as gemma3
from lockstep.models.families import glm4_moe as glm4_moe
from lockstep.models.families import gpt_oss as gpt_oss
from lockstep.models.families import llama as llama
from lockstep.models.families import olmo3 as olmo3
from lockstep.models.families import qwen as qwen
from lockstep.models.families import qwen_hybrid as qwen_hybrid
