// Asking the server.

const headers = () => {
  const given = { "Content-Type": "application/json" };
  if (settings.key) given.Authorization = `Bearer ${settings.key}`;
  return given;
};

const failure = async (response) => {
  let text = `${response.status} ${response.statusText}`;
  try { text = (await response.json()).error.message; } catch { /* no JSON: the status says it */ }
  return new Error(response.status === 401 ? word("needsKey") : text);
};

const get = async (path) => {
  let response;
  try { response = await fetch(path, { headers: headers() }); }
  catch { throw new Error(word("offline")); }
  if (!response.ok) throw await failure(response);
  return response.json();
};

const post = async (path, body) => {
  let response;
  try { response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body) }); }
  catch { throw new Error(word("offline")); }
  if (!response.ok) throw await failure(response);
  return response.json();
};
