// Words of the page in both languages.
const WORDS = {
  en: {
    skip: "Skip to the message", close: "Close the list", talks: "Conversations", newTalk: "New conversation",
    language: "Language", theme: "Colours", themeAuto: "System", themeLight: "Light", themeDark: "Dark",
    forgetAll: "Forget all conversations", forgetAsk: "Forget all conversations of this browser?", model: "Model",
    settings: "Settings", system: "System message", temperature: "Temperature", maxTokens: "Longest answer, tokens",
    seed: "Seed", key: "Key of the server",
    settingsNote: "An empty field leaves the choice to the server. Conversations and settings stay in this browser.",
    log: "Conversation", say: "Message", sayShort: "Ask something", sayHint: "Ask something. Enter sends, Shift+Enter begins a line, Esc stops.",
    send: "Send", stop: "Stop", copy: "Copy", copied: "Copied", edit: "Edit", again: "Again", remove: "Forget",
    you: "You", untitled: "New conversation", save: "Send", cancel: "Cancel", empty: "What shall we talk about?",
    speed: (tokens, rate, first) => `${tokens} tokens · ${rate} tokens/s · first after ${first} s`,
    writing: (tokens, rate) => `${tokens} tokens · ${rate} tokens/s`, cut: "cut at the longest length", stopped: "stopped", retry: "Try again",
    offline: "The server cannot be reached.", needsKey: "The server asks for a key: see Settings.",
    full: "This browser's storage is full: the oldest conversations were forgotten.", noModels: "no model", adapter: (name) => `${name} (adapter)`,
    answering: "Answering", done: "Answered",
  },
  zh: {
    skip: "跳到输入框", close: "关闭列表", talks: "对话列表", newTalk: "新对话",
    language: "语言", theme: "颜色", themeAuto: "系统", themeLight: "浅色", themeDark: "深色",
    forgetAll: "清除全部对话", forgetAsk: "清除此浏览器中的全部对话？", model: "模型",
    settings: "设置", system: "系统消息", temperature: "温度", maxTokens: "回答最多词元数",
    seed: "随机种子", key: "服务器密钥",
    settingsNote: "留空则由服务器决定。对话和设置只保存在此浏览器中。",
    log: "对话", say: "消息", sayShort: "请输入问题", sayHint: "请输入问题。Enter 发送，Shift+Enter 换行，Esc 停止。",
    send: "发送", stop: "停止", copy: "复制", copied: "已复制", edit: "编辑", again: "重新回答", remove: "删除",
    you: "您", untitled: "新对话", save: "发送", cancel: "取消", empty: "想聊些什么？",
    speed: (tokens, rate, first) => `${tokens} 个词元 · 每秒 ${rate} 个 · 首个用时 ${first} 秒`,
    writing: (tokens, rate) => `${tokens} 个词元 · 每秒 ${rate} 个`, cut: "已达最大长度", stopped: "已停止", retry: "重试",
    offline: "无法连接服务器。", needsKey: "服务器要求密钥：请在“设置”中填写。",
    full: "浏览器存储已满：最早的对话已删除。", noModels: "没有模型", adapter: (name) => `${name}（适配器）`,
    answering: "正在回答", done: "回答完毕",
  },
};
let language = "en";
const word = (name, ...rest) => {
  const found = WORDS[language][name] ?? WORDS.en[name];
  return typeof found === "function" ? found(...rest) : found;
};
