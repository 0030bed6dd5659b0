// Models, and their answers as they come.

const isSeeing = (model) => Boolean(model.architecture?.input_modalities?.includes?.("image"));

const models = async () => (await get("v1/models")).data.filter((one) => one.max_model_len);

// Yields the events of a stream; an event may come in pieces.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest = (rest + value).replaceAll("\r\n", "\n");
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data:")) yield part.slice(5).trimStart();
  }
}

const toolCall = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });

// Pictures stand before the text, as in the rows that models learn from; one that was not kept is left out.
const contentOf = (text, pictures) => {
  const parts = pictures.filter(Boolean).map((url) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
};

// The messages of a turn. Calls without results are not sent: servers want a result for each.
const MESSAGES = {
  user: ({ content, pictures }) => [{ role: "user", content: contentOf(content, pictures) }],
  assistant: ({ content, calls, reasoning }, follower, isCurrent) => {
    if (follower?.role !== "tool") return content ? [{ role: "assistant", content }] : [];
    const thought = reasoning && isCurrent ? { reasoning_content: reasoning } : {};
    return [{ role: "assistant", content: content || null, ...thought, tool_calls: calls.map(toolCall) }];
  },
  tool: ({ results }) => results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content })),
};

// Chat templates want turns that alternate: a question whose answer never came is left out with it.
const messagesOf = (turns) => rounds(turns).flatMap((round, at, all) => {
  const isCurrent = at === all.length - 1;
  const isAnswered = round.at(-1).role === "assistant" && round.at(-1).content;
  return isCurrent || isAnswered ? round.flatMap((turn, place) => MESSAGES[turn.role](turn, round[place + 1], isCurrent)) : [];
});

const requestOf = (turns, model) => {
  const body = { messages: messagesOf(turns), stream: true, stream_options: { include_usage: true } };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  if (model) body.model = model;
  const { tools, problem } = readTools(settings.tools);
  if (problem) throw new Error(problem);
  if (tools.length) body.tools = tools;
  for (const name of NUMBERS) {
    const value = settings[name];
    if (value !== "" && value !== undefined && value !== null && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  return body;
};

const THINK_OPEN = "<think>", THINK_CLOSE = "</think>";

// Finds reasoning that a server left in the text. Until the tag is complete, its beginning belongs to neither.
const splitThought = (text, isWhole) => {
  const start = text.trimStart();
  if (!start.startsWith(THINK_OPEN)) return { reasoning: "", content: !isWhole && THINK_OPEN.startsWith(start) ? "" : text };
  const inside = start.slice(THINK_OPEN.length);
  const end = inside.indexOf(THINK_CLOSE);
  if (end >= 0) return { reasoning: inside.slice(0, end).trim(), content: inside.slice(end + THINK_CLOSE.length).trimStart() };
  let begun = isWhole ? 0 : THINK_CLOSE.length - 1;
  while (begun && !inside.endsWith(THINK_CLOSE.slice(0, begun))) begun -= 1;
  return { reasoning: inside.slice(0, inside.length - begun).trim(), content: "" };
};

// What has come of an answer.
const makeAnswer = () => {
  const began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  const how = { tokens: 0, first: 0, seconds: 0, end: "" };
  let text = "", thought = "", isWhole = false;
  const calls = [];
  return {
    how,
    close() { isWhole = true; },
    parts() {
      const found = thought ? { reasoning: thought, content: text } : splitThought(text, isWhole);
      return { ...found, calls: keptCalls(calls) };
    },
    // Takes an event. Returns true when there is more to show.
    take(event) {
      if (event.error) throw Object.assign(new Error(event.error.message ?? String(event.error)), { told: true });
      if (event.usage) how.tokens = Number(event.usage.completion_tokens) || how.tokens;
      const { delta, finish_reason: end } = event.choices?.[0] ?? {};
      const content = isText(delta?.content) ? delta.content : "";
      const reasoning = [delta?.reasoning_content, delta?.reasoning].find(isText) ?? "";
      const isMore = Boolean(content || reasoning || delta?.tool_calls?.length);
      if (isMore || end) how.seconds = since();
      if (end) how.end = String(end);
      if (!isMore) return false;
      how.first ||= how.seconds;
      how.tokens += 1;
      text += content;
      thought += reasoning;
      addCalls(calls, delta.tool_calls);
      return true;
    },
  };
};

// Asks for the next answer of a conversation; `onMore` gets what is there so far and how it goes. Returns how it went.
const ask = async (turns, model, signal, onMore) => {
  const body = JSON.stringify(requestOf(turns, model));
  const answer = makeAnswer();
  const stopped = () => ({ ...answer.how, end: "stopped" });
  let response;
  try { response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal }); }
  catch (error) { if (error.name === "AbortError") return stopped(); throw new Error(word("offline")); }
  if (!response.ok) throw response.status === 413 ? new Error(word("requestLarge")) : await failure(response);
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") { answer.close(); onMore(answer); return answer.how; }
      if (answer.take(JSON.parse(data))) onMore(answer);
    }
  } catch (error) {
    answer.close();
    onMore(answer);
    if (error.name === "AbortError") return stopped();
    throw error.told ? error : new Error(word("torn"));
  }
  answer.close();
  onMore(answer);
  throw new Error(word("torn"));
};
