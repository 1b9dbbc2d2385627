"""Agent frameworks from PyPI, unmodified, play several turns through the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from gateways import MODEL, Gateway, says

from lockstep.types import Message

openai = pytest.importorskip("openai", reason="the client `openai` is not installed")


def script(prompt: str) -> Message:
    """Adds 2 and 3, then multiplies by 4, then answers with what the tools said."""
    last = prompt.rpartition("<|im_start|>user")[2]
    if "<tool_response>\n5\n" in last:
        return says(thinking="Now times four.", multiply='{"a": 5, "b": 4}')
    if "<tool_response>\n20\n" in last:
        return says("It is 20.", thinking="Done.")
    if "And in words?" in last:
        return says("Twenty.")
    return says("I add first.", thinking="2 + 3", add='{"a": 2, "b": 3}')


def add(a: int, b: int) -> int:
    "Adds."
    return a + b


def multiply(a: int, b: int) -> int:
    "Multiplies."
    return a * b


@pytest.fixture
def gateway():
    with Gateway(script) as found:
        yield found


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_openai_agents_plays_with_tools_and_its_trajectory_is_one_exact_path(
    gateway: Gateway, dialect: str, is_streamed: bool
):
    agents = pytest.importorskip("agents", reason="the package `openai-agents` is not installed")
    agents.set_tracing_disabled(True)

    _, made = gateway.ask("POST", "/sessions")

    async def play() -> tuple[str, str]:
        client = openai.AsyncOpenAI(base_url=made["openai_base_url"], api_key=made["api_key"])
        kind: Any = (
            agents.OpenAIChatCompletionsModel if dialect == "chat" else agents.OpenAIResponsesModel
        )
        agent = agents.Agent(
            name="calculator",
            instructions="Use the tools.",
            model=kind(model=MODEL, openai_client=client),
            tools=[agents.function_tool(add), agents.function_tool(multiply)],
        )

        async def run(given: Any) -> Any:
            if not is_streamed:
                return await agents.Runner.run(agent, given)
            running = agents.Runner.run_streamed(agent, given)
            async for _ in running.stream_events():
                pass
            return running

        first = await run("What is (2 + 3) * 4?")
        again = [*first.to_input_list(), {"role": "user", "content": "And in words?"}]
        second = await run(again)
        await client.close()
        return first.final_output, second.final_output

    assert gateway.call(play()) == ("It is 20.", "Twenty.")
    gateway.check_exact(made["id"], num_turns=4)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_pydantic_ai_plays_with_tools_and_its_trajectory_is_one_exact_path(
    gateway: Gateway, dialect: str
):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="`pydantic-ai-slim` is not installed")
    from pydantic_ai.models import anthropic as anthropic_models
    from pydantic_ai.models import openai as openai_models
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    _, made = gateway.ask("POST", "/sessions")
    if dialect == "messages":
        to_claude = AnthropicProvider(base_url=made["base_url"], api_key=made["api_key"])
        model: Any = anthropic_models.AnthropicModel(MODEL, provider=to_claude)
    else:
        provider = OpenAIProvider(base_url=made["openai_base_url"], api_key=made["api_key"])
        kinds = {
            "chat": openai_models.OpenAIChatModel,
            "responses": openai_models.OpenAIResponsesModel,
        }
        model = kinds[dialect](MODEL, provider=provider)
    tools = [add, multiply]
    agent = pydantic_ai.Agent(model, tools=tools, system_prompt="Use the tools.")

    async def play() -> tuple[str, str]:
        first = await agent.run("What is (2 + 3) * 4?")
        second = await agent.run("And in words?", message_history=first.all_messages())
        return first.output, second.output

    assert gateway.call(play()) == ("It is 20.", "Twenty.")
    gateway.check_exact(made["id"], num_turns=4)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_langchain_plays_with_tools_and_its_trajectory_is_one_exact_path(
    gateway: Gateway, dialect: str
):
    langchain = pytest.importorskip("langchain.agents", reason="`langchain` is not installed")
    to_openai = pytest.importorskip("langchain_openai", reason="package is missing")
    to_claude = pytest.importorskip(
        "langchain_anthropic", reason="`langchain-anthropic` is missing"
    )

    _, made = gateway.ask("POST", "/sessions")
    if dialect == "messages":
        model = to_claude.ChatAnthropic(
            model=MODEL, base_url=made["base_url"], api_key=made["api_key"], max_tokens=512
        )
    else:
        model = to_openai.ChatOpenAI(
            model=MODEL,
            base_url=made["openai_base_url"],
            api_key=made["api_key"],
            use_responses_api=dialect == "responses",
        )
    agent = langchain.create_agent(model, tools=[add, multiply], system_prompt="Use the tools.")
    said = [{"role": "user", "content": "What is (2 + 3) * 4?"}]
    first = agent.invoke({"messages": said})["messages"]
    second = agent.invoke({"messages": [*first, {"role": "user", "content": "And in words?"}]})
    assert (first[-1].text, second["messages"][-1].text) == ("It is 20.", "Twenty.")
    gateway.check_exact(made["id"], num_turns=4)
