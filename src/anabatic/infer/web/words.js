// Words of every page in both languages; a page adds its own.
const WORDS = {
  en: {
    language: "Language", theme: "Colours", themeAuto: "System", themeLight: "Light", themeDark: "Dark",
    close: "Close the list", settings: "Settings", key: "Key of the server", copy: "Copy", copied: "Copied", taskOpen: "To do", taskDone: "Done",
    offline: "The server cannot be reached.", needsKey: "The server asks for a key: see Settings.",
  },
  zh: {
    language: "语言", theme: "颜色", themeAuto: "系统", themeLight: "浅色", themeDark: "深色",
    close: "关闭列表", settings: "设置", key: "服务器密钥", copy: "复制", copied: "已复制", taskOpen: "待完成", taskDone: "已完成",
    offline: "无法连接服务器。", needsKey: "服务器要求密钥：请在“设置”中填写。",
  },
};
let language = "en";
const word = (name, ...rest) => {
  const found = WORDS[language][name] ?? WORDS.en[name];
  return typeof found === "function" ? found(...rest) : found;
};
