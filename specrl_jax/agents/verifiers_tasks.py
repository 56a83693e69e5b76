"""Environments of the verifiers package, as environments: `verifiers:NAME`.

The package plays and scores an episode itself. Its `Env` runs an agent, which queries a model
server for each turn. Here that server replies with the policy's response: `reset` and `step` wait
for the next request, and the policy reads the messages that are new in it. The agent's loop and its
tools run in this process, where the package would start a program for each. No JAX.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from mcp import Client
from mcp.server.mcpserver import MCPServer
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.utils import loaders

from specrl_jax.agents.environment_protocol import Step
from specrl_jax.agents.tool_calls import END, CallError, find_calls, read_call
from specrl_jax.inputs import one_line

# What the chat templates of Qwen and Hermes tell a policy about its tools.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_HOST = "127.0.0.1"
_UNREADABLE = "unreadable"  # name of a malformed call, as the package sees it


# --- what the rollouts use ------------------------------------------------------------------------


class Episode:
    """An episode of a taskset; `load_taskset` makes a class for each."""

    contained = False  # the package uses HTTP within this process
    pays_at_end = True

    name = ""

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self.begin(metadata["task"], metadata.get("options") or {})

    def begin(self, task: dict, options: dict[str, Any]) -> list[dict[str, str]]:
        """Start a task's episode; return the messages of its first prompt. task: its data's fields.

        options: fields of the taskset's configuration.
        """
        self._turns: asyncio.Queue[str | None] = asyncio.Queue()  # None: no more
        self._news: queue.SimpleQueue[list[dict] | float | Exception] = queue.SimpleQueue()
        self._known = 0  # messages of the conversation
        playing = self._play(task, options)
        self._thread = threading.Thread(target=asyncio.run, args=(playing,), daemon=True)
        self._thread.start()
        self._first = self._wait()
        return self._first if isinstance(self._first, list) else []

    def end(self) -> None:
        """Make the package abort the episode, at the request that it waits for."""
        self._loop.call_soon_threadsafe(self._turns.put_nowait, None)
        self._thread.join()

    def step(self, response: str) -> Step:
        if isinstance(self._first, float):
            return Step(reward=self._first, done=True)
        self._loop.call_soon_threadsafe(self._turns.put_nowait, response)
        news = self._wait()
        if isinstance(news, float):
            return Step(reward=news, done=True)
        text = "\n".join(message["content"] for message in news)
        only_tools = all(message["role"] == "tool" for message in news)
        return Step(text, role="tool" if only_tools else "user")

    def score(self) -> float:
        """Return what the package pays for the turns so far, as after its own turn limit.

        0 before the first turn.
        """
        if isinstance(self._first, float):
            return self._first
        if not self._chat.trace.num_turns:
            return 0.0
        self._chat.trace.stop("max_turns")  # the package drops the reply that comes then
        self._loop.call_soon_threadsafe(self._turns.put_nowait, "")
        news = self._wait()
        if not isinstance(news, float):
            raise RuntimeError("the episode continues after its end")
        return news

    def _wait(self) -> list[dict[str, str]] | float:
        """Return the messages of the next request that are new, or the reward at the end."""
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    async def _play(self, task: dict, options: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._news.put(await self._reward(task, options))
        except Exception as error:
            self._news.put(error)

    async def _reward(self, task: dict, options: dict[str, Any]) -> float:
        """Run the package's episode; return its reward."""
        env = vf.load_environment(_env_config(self.name, options))
        task_type = type(env.taskset).task_type()
        data = task_type.data_type().model_validate(task)
        played = task_type(data, env.config.taskset.task)
        async with (
            self._model() as model,
            _in_this_process(env, played) as self._chat,
            env.serving(),
        ):
            episode = await env.run_episode(played, model)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(errors[-1].message if errors else "the episode did not end well")
        return float(sum(trace.reward for trace in episode.traces))

    @contextlib.asynccontextmanager
    async def _model(self) -> AsyncIterator[vf.ModelContext]:
        """Serve the policy as a model."""
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._complete)
        server = web.AppRunner(app)
        await server.setup()
        try:
            await web.TCPSite(server, _HOST, 0).start()
            _, port = server.addresses[0]
            client = vf.EvalClientConfig(base_url=f"http://{_HOST}:{port}/v1", api_key_var="NONE")
            yield vf.ModelContext("policy", client)
        finally:
            await server.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        """Reply to a completion request with the policy's next response."""
        body = await request.json()
        messages = body["messages"]
        new = messages[self._known :]
        if self._known and (len(new) < 2 or new[0]["role"] != "assistant"):
            self._news.put(ValueError("an episode must be one conversation, another one starts"))
        tools = body.get("tools") or []
        if self._known:
            shown = [_message(each) for each in new[1:]]
        else:
            shown = _first_messages(new, tools)
        self._known = len(messages)
        self._news.put(shown)
        response = await self._turns.get()
        if response is None:
            return web.json_response({"error": {"message": "no more turns"}}, status=400)
        said, faults = _parse_turn(response, bool(tools), self._known)
        self._chat.faults |= faults
        reason = "tool_calls" if "tool_calls" in said else "stop"
        choice = {"index": 0, "message": said, "finish_reason": reason}
        head = {"id": "policy", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response(head | {"choices": [choice]})


def load_taskset(name: str) -> type[Episode]:
    """Return the environment of a taskset, a module of that name. Raises a one-line ValueError."""
    with one_line(f"a taskset of verifiers must be a module that exports one, got {name!r}"):
        _role(name)
    return type("Episode", (Episode,), {"name": name, "call_end": END if _has_tools(name) else ""})


def read_tasks(name: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a taskset in order: prompt, answer, options and task, its data.

    The prompt is what an episode's first request asks, including what it says about tools.
    """
    episode = load_taskset(name)()
    for task in vf.load_environment(_env_config(name, options)).taskset:
        data = task.data.model_dump(mode="json", exclude_unset=True)
        messages = episode.begin(data, options)
        if not messages:
            raise ValueError(f"task {task.data.idx} is over before it asks anything")
        episode.end()
        alone = len(messages) == 1 and messages[0]["role"] == "user"
        yield {
            "prompt": messages[0]["content"] if alone else messages,
            "answer": str(data.get("answer", task.key)),
            "options": options,
            "task": data,
        }


def _role(name: str) -> str:
    """Return the role of the one agent in a taskset's environment."""
    loaders.taskset_class(name)  # raises where the module exports none
    kind = loaders.env_config_type(name)
    defaults = {role: field.default for role, field in kind.model_fields.items()}
    roles = [role for role, value in defaults.items() if isinstance(value, vf.AgentConfig)]
    if len(roles) != 1:
        raise ValueError(f"one policy plays one agent, not {', '.join(roles)}")
    return roles[0]


def _has_tools(name: str) -> bool:
    """Return whether a taskset or its tasks may have tools."""
    taskset = loaders.taskset_class(name)
    owners = ((taskset, vf.Taskset), (taskset.task_type(), vf.Task))
    find = functools.partial(inspect.getattr_static, attr="toolsets")
    return any(find(kind) is not find(base) for kind, base in owners)


def _env_config(name: str, options: dict[str, Any]) -> vf.EnvConfig:
    """Return the configuration of an environment on this machine."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return loaders.resolve_env_config({"taskset": {**options, "id": name}, _role(name): agent})


# --- messages -------------------------------------------------------------------------------------


def _message(message: dict) -> dict[str, str]:
    """Return the role and the text of a message."""
    content = message["content"] or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)  # KeyError: no text
    return {"role": message["role"], "content": content}


def _first_messages(messages: Sequence[dict], tools: Sequence[dict]) -> list[dict[str, str]]:
    """Return the prompt of an episode; its system message describes the tools."""
    shown = [_message(message) for message in messages]
    if not tools:
        return shown
    text = _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if shown[0]["role"] == "system":
        return [{"role": "system", "content": f"{shown[0]['content']}\n\n{text}"}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]


def _parse_turn(
    response: str, has_tools: bool, position: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a response as the assistant's message, with the tool calls that it contains.

    Also return why calls are malformed, by their ids. position: of the message, for these ids.
    """
    message: dict[str, Any] = {"role": "assistant", "content": response}
    around, texts = find_calls(response) if has_tools else (response, [])
    calls = []
    faults = {}
    for call in (call for text in texts for call in read_call(text)):
        ident = f"call-{position}-{len(calls)}"
        function = {"name": _UNREADABLE, "arguments": "{}"}
        if isinstance(call, CallError):
            faults[ident] = call.reason
        else:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append({"id": ident, "type": "function", "function": function})
    if calls:
        message["content"] = around.strip()
        message["tool_calls"] = calls
    return message, faults


# --- the agent's loop and its tools ---------------------------------------------------------------


class _ChatLoop(NullHarness):
    """Loop of the package's `null` harness, in this process."""

    SUPPORTS_TOOL_INTERCEPTION = False

    tools: dict[str, MCPServer]  # that run in this process, by name prefix
    faults: dict[str, str]  # why calls are malformed, by their ids
    trace: vf.Trace  # of the episode

    async def setup(self, runtime: vf.Runtime) -> None:
        """Install nothing: no program is started."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Query the model and call the tools that it names, until it names none."""
        self.trace = trace
        system, prompt = self.resolve_prompt(data)
        opening = [vf.SystemMessage(content=system)] if system else []
        opening += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [message_to_wire(message) for message in opening]
        headers = {"Authorization": f"Bearer {secret}"}
        async with contextlib.AsyncExitStack() as stack:
            http = httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None)
            model = await stack.enter_async_context(http)
            tools = await _connect({**mcp_urls, **self.tools}, stack)
            schemas = [schema for schema, _ in tools.values()]
            body = {"model": ctx.model} | ({"tools": schemas} if schemas else {})
            while True:
                answer = await model.post("/chat/completions", json=body | {"messages": messages})
                if answer.is_error:  # the package has stopped the episode, or reports a failure
                    return vf.ProgramResult(1, "", answer.text)
                said = answer.json()["choices"][0]["message"]
                messages.append(said)
                if not said.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                messages += [await self._answer(tools, call) for call in said["tool_calls"]]

    async def _answer(
        self, tools: Mapping[str, tuple[dict, Callable]], call: dict
    ) -> dict[str, Any]:
        """Return the message with a tool's reply to a call."""
        name = call["function"]["name"]
        if fault := self.faults.get(call["id"]):
            content = f"error: {fault}"
        elif name not in tools:
            content = f"error: unknown tool {name!r}"
        else:
            _, function = tools[name]
            result = await function(json.loads(call["function"]["arguments"]))
            content = mcp_content_to_chat_content(result.content)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


async def _connect(
    servers: Mapping[str, MCPServer | str], stack: contextlib.AsyncExitStack
) -> dict[str, tuple[dict, Callable]]:
    """Return schema and function of each tool of the servers (or of those at URLs), by name."""
    tools = {}
    for prefix, server in servers.items():
        client = await stack.enter_async_context(Client(server))
        for tool in (await client.list_tools()).tools:
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            function = {"name": name, "description": tool.description or ""}
            schema = {"type": "function", "function": function | {"parameters": tool.input_schema}}
            tools[name] = (schema, functools.partial(client.call_tool, tool.name))
    return tools


@contextlib.asynccontextmanager
async def _in_this_process(env: vf.Env, task: vf.Task) -> AsyncIterator["_ChatLoop"]:
    """Run the environment's agent in this process, with its tools if possible; yield its loop."""
    role = _role(env.config.taskset.id)
    loop = _ChatLoop(getattr(env.config, role).harness)
    loop.tools = {}
    loop.faults = {}
    set_up = env.setup

    async def set_up_loop(agents: vf.Agents) -> None:
        getattr(agents, role).harness = loop
        await set_up(agents)

    env.setup = set_up_loop
    async with contextlib.AsyncExitStack() as stack:
        for owner, config in ((env.taskset, env.config.taskset), (task, task.config)):
            elsewhere = []
            for toolset in owner.toolsets(config):
                if toolset.config.url or toolset.config.runtime.type != "subprocess":
                    elsewhere.append(toolset)
                    continue
                await stack.enter_async_context(toolset._exit_stack)
                await toolset.setup()
                if owner is task:
                    await toolset.setup_task(task.data)
                loop.tools[toolset.server_name] = _serve(toolset, loop)
            owner.toolsets = lambda config, served=elsewhere: served
        yield loop


def _serve(toolset: vf.Toolset, loop: _ChatLoop) -> MCPServer:
    """Return a server for the tools in this process; they change the episode's own state."""

    async def pull() -> vf.State:
        return loop.trace.state

    async def push(before: bytes) -> None:
        """Do nothing: the state is the episode's."""

    toolset._pull_state = pull
    toolset._push_state = push
    name = toolset.server_name or type(toolset).__name__
    server = MCPServer(name, log_level="ERROR")
    toolset.register(server)
    return server
