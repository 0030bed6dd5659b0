// Models, and their answers as they come.

const models = async () => (await get("v1/models")).data.filter((one) => one.max_model_len);

// Yields the events of a stream; an event may come in pieces.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

// Chat templates want turns that alternate: a question whose answer never came is left out with it.
const messagesOf = (turns) => {
  const out = [];
  turns.forEach(({ role, content }, at) => {
    const kept = role === "assistant" ? content : at === turns.length - 1 || turns[at + 1].content;
    if (kept) out.push({ role, content });
  });
  return out;
};

// Asks for the next answer of a conversation; `onText` gets what is there so far. Returns how it went.
const ask = async (turns, signal, onText) => {
  const body = { messages: messagesOf(turns), stream: true, stream_options: { include_usage: true } };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  if (settings.model) body.model = settings.model;
  for (const name of FIELDS.slice(1)) {
    const value = settings[name];
    if (value !== "" && value !== undefined && value !== null && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  const began = performance.now();
  const out = { text: "", reasoning: "", tokens: 0, first: 0, seconds: 0, end: "" };
  let response;
  try { response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal }); }
  catch (error) { if (error.name === "AbortError") return { ...out, end: "stopped" }; throw new Error(word("offline")); }
  if (!response.ok) throw await failure(response);
  let whole = false;
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") { whole = true; break; }
      const event = JSON.parse(data);
      if (event.error) throw Object.assign(new Error(event.error.message), { told: true });
      if (event.usage) out.tokens = event.usage.completion_tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const content = choice.delta?.content ?? "", reasoning = choice.delta?.reasoning_content ?? "";
      if (content || reasoning) {
        if (!out.first) out.first = (performance.now() - began) / 1000;
        out.text += content;
        out.reasoning += reasoning;
        out.tokens += 1;
        out.seconds = (performance.now() - began) / 1000;
        onText(out);
      }
      if (choice.finish_reason) { out.end = choice.finish_reason; out.seconds = (performance.now() - began) / 1000; }
    }
  } catch (error) {
    if (error.name === "AbortError") return { ...out, end: "stopped" };
    throw error.told ? error : new Error(word("torn"));
  }
  if (!whole) throw new Error(word("torn"));
  return out;
};
