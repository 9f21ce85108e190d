"""Small chat templates that behave as those of the families do, and a tokenizer that can carry any of them."""

# Qwen2.5: a default system turn; tool text in a user turn, several in a row in one.
QWEN25 = """
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# ... that tells of tools in the system turn, and writes the calls of a turn itself.
_TOOLS = """
{%- if tools -%}
{{ '<|im_start|>system\\n' + (messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '') }}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools><|im_end|>\\n' }}
{%- set messages = messages[1:] if messages[0]['role'] == 'system' else messages -%}
{%- elif messages[0]['role'] != 'system' -%}"""
QWEN25_TOOLS = QWEN25.replace("\n{%- if messages[0]['role'] != 'system' -%}", _TOOLS, 1)
# ... in the manner of Mistral: tools stand before the last user message, so a later one moves them.
TOOLS_LAST = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if tools and loop.index0 == ns.last -%}
{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Qwen3: no default system turn; tool text as Qwen2.5; of the turns before the last user message the thinking is
# dropped, after it thinking is written in one form, and a last turn without any gets an empty one.
_QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set text = m['content'] -%}
{%- if m['role'] == 'assistant' -%}
{%- set why = '' -%}
{%- if '</think>' in text -%}
{%- set why = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or why) -%}
{{ '<think>\\n' + why.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
{%- else -%}{{ text }}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- elif m['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\nOPENS' }}{%- endif -%}
"""
QWEN3 = _QWEN3.replace("OPENS", "")
# ... with its thinking switched off: the generation prompt holds an empty thinking, which a later rendering drops.
QWEN3_SILENT = _QWEN3.replace("OPENS", "<think>\\n\\n</think>\\n\\n")
# ... of the thinking-only kind: the generation prompt opens the thinking.
QWEN3_OPENS = _QWEN3.replace("OPENS", "<think>\\n")

# SmolLM2: a default system turn; any role is its own.
SMOLLM2 = """
{%- for m in messages -%}
{%- if loop.first and m['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a small helper<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Llama 3.x: a first token, a system turn with the date of the day, contents stripped, tool text as JSON by `ipython`.
LLAMA3 = """{{ bos_token }}
{%- if strftime_now is defined -%}{%- set day = strftime_now('%d %b %Y') -%}{%- else -%}{%- set day = '26 Jul 2024' -%}
{%- endif -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system, rest = messages[0]['content'] | trim, messages[1:] -%}
{%- else -%}
{%- set system, rest = '', messages -%}
{%- endif -%}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + day + '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in rest -%}
{%- if m['role'] in ['tool', 'ipython'] -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m['content'] | tojson) + '<|eot_id|>' }}
{%- else -%}
{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

# ... of an older kind, that has no tools: contents stripped, and any other role is an error.
LLAMA_WITHOUT_TOOLS = """{{ bos_token }}{%- for m in messages -%}
{%- if m['role'] not in ['system', 'user', 'assistant'] -%}{{ raise_exception('no such role') }}{%- endif -%}
{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

# Drops the thinking of turns before the last user message, and writes every other role as its own.
DROPS_EARLIER = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{%- set text = m['content'] -%}
{%- if m['role'] == 'assistant' and loop.index0 < ns.last -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# R1's manner: the generation prompt opens the thinking, every earlier thinking is dropped, and nobody is a tool.
OPENS_AND_DROPS = """
{%- for m in messages -%}
{%- if m['role'] in ['user', 'assistant', 'system'] -%}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1] + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""

# Keeps the thinking of the newest turn alone, whoever speaks after it.
KEEPS_THE_LAST = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set text = m['content'] -%}
{%- if m['role'] == 'assistant' and loop.index0 < ns.last -%}{%- set text = text.split('</think>')[-1] -%}{%- endif -%}
{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK_TOKENS = ["<think>", "</think>", "<tool_response>", "</tool_response>"]  # of Qwen3; plain text in Qwen2.5
LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_TOKENS += ["<|eom_id|>", "<|python_tag|>"]
DEEPSEEK_TOKENS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
DEEPSEEK_TOKENS += ["<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"]

QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
# by family: template, added tokens, named tokens
FAMILIES = {
    "llama3": (LLAMA3, LLAMA_TOKENS, LLAMA),
    "smollm2": (SMOLLM2, QWEN_TOKENS, QWEN),
    "qwen2.5": (QWEN25, QWEN_TOKENS, QWEN),
    "qwen3": (QWEN3, QWEN_TOKENS + THINK_TOKENS, QWEN),
}

CORPUS = ["What is the capital of Peru ? <think> I will search </think> Doc 1(Title: Peru) capital: Lima; user tool\n"]


def make_tokenizer(template, tokens, named, vocab_size=300):
    """Byte-level BPE with the added `tokens`, trained on a line of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(tokens), initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_special_tokens(tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
