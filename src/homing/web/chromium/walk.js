// What a page shows, as text: runs in an isolated world, so that the page can neither see nor change it.
// `look` lists the visible nodes and gives each a ref; `locate` says where a ref is and what covers it.
// Refs are numbers that an element keeps while its document lives; only those of the last look are found.
(() => {
  const numbers = new WeakMap();
  let known = new Map();
  let next = 1;

  const squeeze = (text) => text.replace(/\s+/g, " ").trim();
  const clip = (text, most) => (text.length > most ? text.slice(0, most) + "…" : text);
  const quote = (text, most = 300) => JSON.stringify(clip(squeeze(text), most));

  const TAGS = {
    a: "link", button: "button", textarea: "textbox", select: "combobox", option: "option", optgroup: "group", img: "img",
    h1: "heading", h2: "heading", h3: "heading", h4: "heading", h5: "heading", h6: "heading", table: "table", tr: "row",
    td: "cell", th: "columnheader", ul: "list", ol: "list", li: "listitem", nav: "navigation", form: "form",
    dialog: "dialog", iframe: "iframe", canvas: "canvas", svg: "graphic", circle: "circle", ellipse: "ellipse",
    rect: "rect", polygon: "polygon", polyline: "polyline", line: "line", path: "path", summary: "button",
    progress: "progressbar", meter: "meter", video: "video", audio: "audio", main: "main", header: "banner",
    footer: "contentinfo", aside: "complementary", label: "label", fieldset: "group", output: "status",
  };
  const INPUTS = {
    checkbox: "checkbox", radio: "radio", range: "slider", number: "spinbutton", button: "button", submit: "button",
    reset: "button", image: "button", file: "button", search: "searchbox",
  };
  const SHAPES = new Set(["circle", "ellipse", "rect", "polygon", "polyline", "line", "path"]);
  // Roles whose name is their content; what is in them is not listed again, unless it can be acted on itself.
  const NAMED_BY_CONTENT = new Set(["link", "button", "option", "heading", "tab", "menuitem", "treeitem", "switch"]);
  const SKIPPED = new Set(["script", "style", "noscript", "template", "head", "link", "meta", "title", "br", "wbr",
    "defs", "lineargradient", "radialgradient", "clippath", "mask", "source", "track", "param"]);

  const roleOf = (element, tag) => {
    const stated = element.getAttribute("role");
    if (stated) return stated.split(" ")[0];
    if (tag === "input") return INPUTS[element.type] || "textbox";
    if (tag === "a" && !element.hasAttribute("href")) return "";
    if (tag === "select" && (element.multiple || element.size > 1)) return "listbox";
    return TAGS[tag] || "";
  };

  // `element.labels` looks through the whole document each time.
  let labelled = new Map();
  const labelsOf = (doc) => {
    let found = labelled.get(doc);
    if (!found) {
      found = new Map();
      labelled.set(doc, found);
      for (const label of doc.querySelectorAll("label")) {
        const control = label.control;
        if (control) found.set(control, [...(found.get(control) ?? []), label]);
      }
    }
    return found;
  };

  const nameOf = (element, tag, role) => {
    const stated = element.getAttribute("aria-label");
    if (stated) return stated;
    const by = element.getAttribute("aria-labelledby");
    if (by) {
      const root = element.getRootNode();
      const text = by.split(/\s+/).map((id) => root.getElementById?.(id)?.textContent || "").join(" ");
      if (text.trim()) return text;
    }
    if (tag === "input" && ["button", "submit", "reset"].includes(element.type)) {
      return element.value || element.title || element.type;
    }
    const labels = labelsOf(element.ownerDocument).get(element);
    if (labels) {
      // A select inside its own label would name itself by all of its options.
      const text = labels.map((label) => (label.contains(element) && tag === "select" ? "" : label.textContent));
      if (text.join("").trim()) return text.join(" ");
    }
    if (element.alt) return element.alt;
    if (NAMED_BY_CONTENT.has(role)) {
      const text = tag === "option" ? element.text : element.innerText ?? element.textContent;
      if (text && text.trim()) return text;
    }
    return element.getAttribute("title") || element.getAttribute("placeholder") || "";
  };

  const isPainted = (style) =>
    (style.backgroundColor !== "rgba(0, 0, 0, 0)" && style.backgroundColor !== "transparent") ||
    style.backgroundImage !== "none" || (style.content && style.content !== "normal" && style.content !== "none") ||
    (style.borderTopStyle !== "none" && parseFloat(style.borderTopWidth) > 0);

  const round = (number) => Math.round(number * 10) / 10;
  const boxOf = (rect, offset) =>
    `box=${Math.round(rect.left + offset.x)},${Math.round(rect.top + offset.y)},${Math.round(rect.width)},${Math.round(rect.height)}`;

  const shapeOf = (element, tag, offset) => {
    const matrix = element.getScreenCTM?.();
    if (!matrix) return "";
    const at = (x, y) => {
      const point = new DOMPoint(x, y).matrixTransform(matrix);
      return `${round(point.x + offset.x)},${round(point.y + offset.y)}`;
    };
    if (tag === "line") {
      return ` from=${at(element.x1.baseVal.value, element.y1.baseVal.value)} to=${at(element.x2.baseVal.value, element.y2.baseVal.value)}`;
    }
    if (tag === "polygon" || tag === "polyline") {
      return ` points=${[...element.points].slice(0, 24).map((point) => at(point.x, point.y)).join(";")}`;
    }
    return "";
  };

  const urlsOf = (style) => {
    const found = /url\("?([^")]*)"?\)/.exec(`${style.content} ${style.backgroundImage}`);
    return found ? found[1] : "";
  };
  const basename = (url) => (url.startsWith("data:") ? "data" : url.split(/[?#]/)[0].split("/").pop());

  const look = (options) => {
    const lines = [];
    const began = performance.now();
    const layout = options.layout;
    let size = 0;
    let visited = 0;
    let cut = "";
    let focused = null;
    next = Math.max(next, options.next);
    known = new Map();
    labelled = new Map();

    const ref = (element) => {
      let number = numbers.get(element);
      if (number === undefined) {
        number = next++;
        numbers.set(element, number);
      }
      known.set(number, element);
      return `e${number}`;
    };
    const put = (depth, line) => {
      const text = "  ".repeat(Math.min(depth, 20)) + line;
      if (size + text.length + 1 > options.size) {
        cut = cut || "size";
        return;
      }
      size += text.length + 1;
      lines.push(text);
    };

    const states = (element, tag, role) => {
      let text = "";
      if (tag === "input" && (element.type === "checkbox" || element.type === "radio")) {
        text += element.checked ? " checked" : "";
      } else if (tag === "input" && element.type === "password") {
        text += ` value=${quote("•".repeat(element.value.length))}`;
      } else if ((tag === "input" && role !== "button") || tag === "textarea") {
        if (element.value !== "" || role !== "button") text += ` value=${JSON.stringify(clip(element.value, 4000))}`;
        if (element.type === "range" || element.type === "number") {
          text += element.min ? ` min=${element.min}` : "";
          text += element.max ? ` max=${element.max}` : "";
        }
        if (element.type === "date" || element.type === "time") text += ` type=${element.type}`;
      } else if (tag === "select" && role === "combobox") {
        text += ` value=${quote(element.selectedOptions[0]?.text || "")}`;
      } else if (tag === "option" && element.selected) text += " selected";
      if (tag.length === 2 && tag[0] === "h" && role === "heading") text += ` level=${tag[1]}`;
      for (const state of ["checked", "selected", "expanded", "pressed", "current", "valuenow", "level", "invalid"]) {
        const value = element.getAttribute(`aria-${state}`);
        if (value === "true") text += ` ${state}`;
        else if (value && (value !== "false" || state === "expanded")) text += ` ${state}=${value}`;
      }
      if (element.disabled || element.getAttribute("aria-disabled") === "true") text += " disabled";
      if (element.readOnly) text += " readonly";
      if (element.required) text += " required";
      return text;
    };

    const visuals = (element, tag, style, offset) => {
      const rect = element.getBoundingClientRect();
      let text = ` ${boxOf(rect, offset)}`;
      if (SHAPES.has(tag) || tag === "text" || tag === "tspan") {
        text += shapeOf(element, tag, offset);
        if (style.fill !== "none") text += ` fill=${style.fill.replace(/ /g, "")}`;
        if (style.stroke !== "none") text += ` stroke=${style.stroke.replace(/ /g, "")}`;
      } else {
        if (style.backgroundColor !== "rgba(0, 0, 0, 0)") text += ` background=${style.backgroundColor.replace(/ /g, "")}`;
        text += ` color=${style.color.replace(/ /g, "")}`;
        const url = tag === "img" ? element.currentSrc || element.src : urlsOf(style);
        if (url) text += ` image=${clip(basename(url), 60)}`;
        if (element.scrollHeight > element.clientHeight + 1 && /auto|scroll/.test(style.overflowY)) {
          text += ` scroll=${Math.round(element.scrollTop)}/${element.scrollHeight - element.clientHeight}`;
        }
        if (style.fontWeight >= 600) text += " bold";
        if (parseFloat(style.opacity) < 1) text += ` opacity=${style.opacity}`;
      }
      if (tag === "text") text += ` size=${style.fontSize}`;
      return text;
    };

    // Below an element whose name is its content, only what can be acted on, or seen and not read, is listed.
    const walk = (element, depth, inName, pointer, offset) => {
      if (cut) return;
      visited += 1;
      if (visited > options.nodes) {
        cut = "nodes";
        return;
      }
      if (visited % 256 === 0 && performance.now() - began > options.milliseconds) {
        cut = "time";
        return;
      }
      const tag = element.localName;
      if (SKIPPED.has(tag)) return;
      if (element.getAttribute("aria-hidden") === "true" && !layout) return;
      const style = getComputedStyle(element);
      if (style.display === "none") return;
      const isHidden = style.visibility !== "visible";
      if (tag === "option" && element.closest("select")?.size <= 1 && !element.closest("select").multiple && !element.closest("select").checkVisibility()) return;
      let role = roleOf(element, tag);
      const isControl = tag === "input" || tag === "select" || tag === "textarea" || tag === "button";
      const isEditable = element.isContentEditable && !(element.parentElement && element.parentElement.isContentEditable);
      const points = style.cursor === "pointer" && !pointer;
      const isShape = SHAPES.has(tag);
      const isText = tag === "text" || tag === "tspan";
      const hasStop = element.hasAttribute("tabindex") && element.tabIndex >= 0;

      let text = "";
      let hasElements = false;
      for (const child of element.childNodes) {
        if (child.nodeType === 3) text += child.data + " ";
        else if (child.nodeType === 1) hasElements = true;
      }
      text = squeeze(text);
      if (tag === "textarea" || tag === "select") text = "";

      let below = depth;
      let name = "";
      if (!isHidden && (role || isEditable || points || isShape || hasStop || element.hasAttribute("draggable") || element.title)) {
        if (!role) role = isEditable ? "textbox" : isShape ? tag : "generic";
        name = nameOf(element, tag, role);
        if (role === "label" && !hasElements) name = text;
        const acts = isControl || isEditable || points || NAMED_BY_CONTENT.has(role) || hasStop || element.title || element.hasAttribute("draggable");
        const isPlain = ["list", "listitem", "table", "row", "cell", "columnheader", "group", "form", "label", "main", "banner", "contentinfo", "complementary", "presentation", "none", "generic", "tbody"].includes(role);
        const rect = element.getBoundingClientRect();
        const isSeen = rect.width > 0 || rect.height > 0 || tag === "option" || isControl;
        if (isSeen && (!inName || acts || isShape || role === "img") && (!isPlain || acts || text || layout && isPainted(style) || ["list", "table", "row"].includes(role))) {
          let line = `[${ref(element)}] ${role}`;
          if (name) line += ` ${quote(name)}`;
          else if (text && !isControl && !hasElements) line += ` ${quote(text)}`;
          line += states(element, tag, role);
          if (document.activeElement === element || element.ownerDocument.activeElement === element) {
            line += " focused";
            focused = ref(element);
          }
          if (isEditable) line += ` value=${quote(element.innerText)}`;
          if (layout && (tag !== "option" || role !== "option" || rect.width > 0)) line += visuals(element, tag, style, offset);
          if (tag === "iframe") line += ` src=${quote(clip(element.src, 100))}`;
          put(depth, line);
          below = depth + 1;
          if (NAMED_BY_CONTENT.has(role) || (name && squeeze(name) === squeeze(text))) inName = true;
          else if (text && !name) text = "";
        }
      } else if (!isHidden && !inName && !hasElements && !text && !isText) {
        // Something to see and nothing to read: a coloured field, an icon.
        const rect = element.getBoundingClientRect();
        if (rect.width > 0 && rect.height > 0 && isPainted(style)) {
          let line = `[${ref(element)}] generic`;
          if (layout) line += visuals(element, tag, style, offset);
          put(depth, line);
        }
        text = "";
      } else if (!isHidden && layout && hasElements && !text && isPainted(style) && tag !== "body" && tag !== "html") {
        put(depth, `[${ref(element)}] generic${visuals(element, tag, style, offset)}`);
        below = depth + 1;
      }
      if (isEditable || isControl && tag !== "select" && tag !== "button") return;

      // What has no extent is not seen, though it may be read out.
      const box = text && layout ? element.getBoundingClientRect() : null;
      if (text && !hasElements && !inName && !isHidden && (!box || box.width > 0 || box.height > 0)) {
        const line = `[${ref(element)}] text ${quote(text)}`;
        put(below, layout ? line + visuals(element, tag, style, offset) : line);
      }
      if (tag === "iframe" || tag === "frame") {
        let inside = null;
        try {
          inside = element.contentDocument;
        } catch {
          inside = null;
        }
        if (inside?.documentElement && !isHidden) {
          const rect = element.getBoundingClientRect();
          walk(inside.documentElement, below, false, false, {
            x: offset.x + rect.left + element.clientLeft, y: offset.y + rect.top + element.clientTop,
          });
        } else if (!isHidden) put(below, "text \"(another origin's frame: not shown)\"");
        return;
      }
      const isPointer = pointer || style.cursor === "pointer";
      const children = element.shadowRoot ? element.shadowRoot.childNodes : tag === "slot" ? element.assignedNodes() : element.childNodes;
      if (!hasElements && !element.shadowRoot && tag !== "slot") return;
      let run = "";
      let nodes = [];
      // Text beside elements, in its place among them; one line for each run of it.
      const flush = () => {
        const words = squeeze(run);
        const [first, last] = [nodes[0], nodes[nodes.length - 1]];
        run = "";
        nodes = [];
        if (!words || inName || isHidden || tag === "select") return;
        let line = `[${ref(element)}] text ${quote(words)}`;
        if (layout) {
          const range = element.ownerDocument.createRange();
          range.setStartBefore(first);
          range.setEndAfter(last);
          line += ` ${boxOf(range.getBoundingClientRect(), offset)}`;
        }
        put(below, line);
      };
      for (const child of children) {
        if (cut) return;
        if (child.nodeType === 3) {
          run += child.data;
          nodes.push(child);
        } else if (child.nodeType === 1) {
          flush();
          walk(child, below, inName, isPointer, offset);
        }
      }
      flush();
    };

    if (document.documentElement) walk(document.documentElement, 0, false, false, { x: 0, y: 0 });
    if (cut) {
      const why = { size: "the text is too long", nodes: "the page has too many nodes", time: "the page takes too long to read" }[cut];
      lines.push(`(cut here: ${why})`);
    }
    return {
      text: lines.join("\n"), cut: cut !== "", focused, next, url: location.href, title: clip(document.title, 300),
      width: innerWidth, height: innerHeight, scroll: [Math.round(scrollX), Math.round(scrollY)],
      dom: options.dom ? document.documentElement.outerHTML.slice(0, options.dom) : null,
      domCut: options.dom ? document.documentElement.outerHTML.length > options.dom : false,
      ready: document.readyState,
    };
  };

  const frameOffset = (element) => {
    let x = 0;
    let y = 0;
    let view = element.ownerDocument.defaultView;
    while (view && view !== window && view.frameElement) {
      const rect = view.frameElement.getBoundingClientRect();
      x += rect.left + view.frameElement.clientLeft;
      y += rect.top + view.frameElement.clientTop;
      view = view.parent;
    }
    return { x, y };
  };

  const topmost = (scope, x, y) => {
    let found = scope.elementFromPoint(x, y);
    while (found?.shadowRoot) {
      const inner = found.shadowRoot.elementFromPoint(x, y);
      if (!inner || inner === found) break;
      found = inner;
    }
    return found;
  };

  const describe = (element) => {
    const tag = element.localName;
    const name = squeeze(element.innerText ?? element.textContent ?? "");
    return `<${tag}${element.id ? ` id=${quote(element.id)}` : ""}>${name ? ` ${quote(clip(name, 60))}` : ""}`;
  };

  const find = (number) => {
    const element = known.get(number);
    if (!element) return { error: "stale" };
    if (!element.isConnected) return { error: "gone" };
    return { element };
  };

  const rectsOf = (element) => {
    const rects = [...element.getClientRects()].filter((rect) => rect.width > 0 && rect.height > 0);
    if (rects.length) return rects;
    const rect = element.getBoundingClientRect(); // an SVG line has a height of 0
    return rect.width > 0 || rect.height > 0 ? [rect] : [];
  };

  // Where to point for this ref, scrolled into view: {x, y}, or {error, by}.
  const locate = (number, options) => {
    const { element, error } = find(number);
    if (error) return { error };
    if (element.localName === "option") {
      const select = element.closest("select");
      if (select && !(select.multiple || select.size > 1)) return { error: "option" };
    }
    if (options.enabled && element.disabled) return { error: "disabled" };
    let rects = rectsOf(element);
    if (!rects.length) return { error: "hidden" };
    const scope = element.getRootNode();
    const attempt = () => {
      rects = rectsOf(element);
      const view = element.ownerDocument.defaultView;
      let covered = null;
      for (const rect of rects.slice(0, 3)) {
        for (const [fx, fy] of [[0.5, 0.5], [0.25, 0.5], [0.75, 0.5], [0.5, 0.25], [0.5, 0.75], [0.1, 0.1], [0.9, 0.9]]) {
          const x = rect.left + rect.width * fx;
          const y = rect.top + rect.height * fy;
          if (x < 0 || y < 0 || x >= view.innerWidth || y >= view.innerHeight) continue;
          const hit = topmost(scope.elementFromPoint ? scope : element.ownerDocument, x, y);
          const label = hit?.closest?.("label");
          if (hit && (hit === element || element.contains(hit) || (label && label.control === element) ||
            (getComputedStyle(element).pointerEvents === "none" && hit.contains(element)))) {
            const offset = frameOffset(element);
            return { x: x + offset.x, y: y + offset.y };
          }
          covered = covered || hit;
        }
      }
      return { covered };
    };
    let found = attempt();
    if (found.x === undefined) {
      element.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
      found = attempt();
    }
    if (found.x !== undefined) return found;
    if (options.force) {
      const offset = frameOffset(element);
      const rect = rects[0];
      return { x: rect.left + rect.width / 2 + offset.x, y: rect.top + rect.height / 2 + offset.y };
    }
    return found.covered ? { error: "covered", by: describe(found.covered) } : { error: "outside" };
  };

  const isOn = (element) =>
    element.checked ?? (element.getAttribute("aria-checked") === "true");

  const announce = (element, ...names) => {
    for (const name of names) element.dispatchEvent(new Event(name, { bubbles: true, composed: true }));
  };

  // Ready a field for text: {typed: true} when the text is to be typed now, {done: true} when the value has been set.
  const prepare = (number, value) => {
    const found = find(number);
    if (found.error) return { error: found.error };
    const element = found.element.localName === "label" && found.element.control ? found.element.control : found.element;
    const tag = element.localName;
    const isField = tag === "textarea" || (tag === "input" && !["checkbox", "radio", "button", "submit", "reset", "image", "file"].includes(element.type));
    if (!isField && !element.isContentEditable) return { error: "not a field" };
    if (element.disabled) return { error: "disabled" };
    if (element.readOnly) return { error: "readonly" };
    if (!element.checkVisibility()) return { error: "hidden" };
    element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    element.focus();
    if (tag === "input" && ["date", "time", "datetime-local", "month", "week", "color", "range"].includes(element.type)) {
      const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
      set.call(element, value);
      if (element.value !== value && !(element.type === "range" && element.value !== "")) return { error: "malformed" };
      announce(element, "input", "change");
      return { done: true };
    }
    if (isField) element.select();
    else element.ownerDocument.getSelection().selectAllChildren(element);
    return { typed: true, empty: isField ? element.value === "" : element.textContent === "" };
  };

  const choose = (number, wanted) => {
    const { element, error } = find(number);
    if (error) return { error };
    const select = element.localName === "option" ? element.closest("select") : element;
    if (!select || select.localName !== "select") return { error: "not a select" };
    if (select.disabled) return { error: "disabled" };
    const options = [...select.options];
    const chosen = [];
    for (const text of wanted) {
      const option = options.find((each) => each.value === text) || options.find((each) => squeeze(each.text) === squeeze(text));
      if (!option) return { error: "no such option" };
      chosen.push(option);
    }
    if (chosen.length > 1 && !select.multiple) return { error: "one option only" };
    select.focus();
    if (select.multiple) for (const option of options) option.selected = chosen.includes(option);
    else if (chosen.length) chosen[0].selected = true;
    announce(select, "input", "change");
    return { done: true };
  };

  const focus = (number) => {
    const { element, error } = find(number);
    if (error) return { error };
    element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    element.focus();
    return { done: true };
  };

  const checked = (number) => {
    const { element, error } = find(number);
    if (error) return { error };
    const control = element.localName === "label" && element.control ? element.control : element;
    if (control.checked === undefined && !control.hasAttribute("aria-checked")) return { error: "not checkable" };
    return { checked: Boolean(isOn(control)), radio: control.type === "radio" };
  };

  const scroll = (number, dx, dy) => {
    const { element, error } = find(number);
    if (error) return { error };
    let here = element;
    while (here && !(here.scrollHeight > here.clientHeight && /auto|scroll/.test(getComputedStyle(here).overflowY))) here = here.parentElement;
    (here || element.ownerDocument.scrollingElement).scrollBy({ left: dx, top: dy, behavior: "instant" });
    return { done: true };
  };

  // The selection that a mouse would make over this element's text, from one character to another.
  const selectText = (number, from, to) => {
    const { element, error } = find(number);
    if (error) return { error };
    if (element.setSelectionRange && element.value !== undefined) {
      element.focus();
      element.setSelectionRange(from ?? 0, to ?? element.value.length);
      return { done: true };
    }
    if (element.isContentEditable) element.focus();
    const range = element.ownerDocument.createRange();
    range.selectNodeContents(element);
    if (from !== null) {
      const nodes = [];
      const walker = element.ownerDocument.createTreeWalker(element, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) nodes.push(walker.currentNode);
      let left = from;
      let right = to;
      let isStarted = false;
      for (const node of nodes) {
        if (!isStarted && left <= node.length) {
          range.setStart(node, left);
          isStarted = true;
        }
        if (right <= node.length) {
          range.setEnd(node, right);
          break;
        }
        left -= node.length;
        right -= node.length;
      }
    }
    const selection = element.ownerDocument.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return { done: true };
  };

  // What is selected, as copying it would take it.
  const copy = () => {
    let focused = document.activeElement;
    while (focused?.shadowRoot?.activeElement) focused = focused.shadowRoot.activeElement;
    if (focused?.localName === "iframe") {
      try {
        focused = focused.contentDocument?.activeElement ?? focused;
      } catch {
        return { text: "" };
      }
    }
    const isField = focused && (focused.localName === "textarea" || focused.localName === "input");
    if (isField && focused.type !== "password" && focused.selectionStart !== null) {
      const text = focused.value.slice(focused.selectionStart, focused.selectionEnd);
      return { text, editable: !focused.readOnly && !focused.disabled };
    }
    const selection = (focused?.ownerDocument ?? document).getSelection();
    return { text: selection ? selection.toString() : "", editable: Boolean(focused?.isContentEditable) };
  };

  const holds = (number) => ({ error: find(number).error });

  const shows = (text) => squeeze(document.body?.innerText ?? "").includes(squeeze(text));

  globalThis.homing = { look, locate, prepare, choose, focus, checked, scroll, selectText, copy, holds, shows };
  return true;
})();
