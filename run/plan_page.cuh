// Writes a memory plan as an HTML page (--plan-picture FILE.html, and plan.html in --out): run/plan_picture.cuh's
// picture, with a description under the mouse, zoom, and a click to show one category. The page needs no other file.
#pragma once
#include "run/plan_picture.cuh" // plan_draw
#include "run/report_file.h"    // report_file_open
#include <stdbool.h>            // bool
#include <stdio.h>              // FILE
#include <string.h>             // strlen
#include <strings.h>            // strcasecmp

static const char *const plan_page_style[] = {
    // clang-format off
    ".plan{--paper:#fff;--ink:#1c2127;--band:#f3f4f6;--line:#d5dae0;--bad:#b3261e;position:relative;background:var(--paper)}\n",
    ".plan svg{width:100%;height:auto;display:block;cursor:crosshair;user-select:none}\n",
    ".plan svg *{vector-effect:non-scaling-stroke}\n",
    ".plan svg>rect[fill=\"#fff\"]{fill:var(--paper)}\n",
    ".plan svg>rect[fill=\"#f0f0f0\"]{fill:var(--band)}\n",
    ".plan g.buffers{stroke:var(--paper)}\n",
    ".plan text{fill:var(--ink)}\n",
    ".plan text[fill=\"#c00\"]{fill:var(--bad)}\n",
    ".plan [stroke=\"#c00\"]{stroke:var(--bad)}\n",
    ".plan [stroke=\"#ccc\"],.plan [stroke=\"#bbb\"]{stroke:var(--line)}\n",
    ".plan [stroke=\"#000\"]{stroke:var(--ink)}\n",
    ".plan .faded{opacity:.1}\n",
    ".plan .key{cursor:pointer}\n",
    ".plan .drawn{fill:var(--ink);fill-opacity:.12;stroke:var(--ink)}\n",
    ".plan .tip{position:fixed;display:none;pointer-events:none;white-space:pre;padding:6px 9px;border-radius:4px;background:var(--ink);color:var(--paper);font:12px/1.45 sans-serif;z-index:9}\n",
    ".plan .say{position:absolute;right:8px;top:6px;font:12px sans-serif;color:var(--ink);opacity:.7}\n",
    "@media (prefers-color-scheme:dark){.plan{--paper:#1b1f25;--ink:#e6e9ee;--band:#22272e;--line:#3a424c;--bad:#ff8a80}}\n",
    // clang-format on
};
static const char *const plan_page_script[] = {
    // clang-format off
    "(function () {\n",
    "  const plan = document.currentScript.previousElementSibling, svg = plan.querySelector('svg'), tip = plan.querySelector('.tip');\n",
    "  const whole = svg.getAttribute('viewBox').split(' ').map(Number), buffers = [...svg.querySelectorAll('g.buffers rect')];\n",
    "  let corner = null, drawn = null, hovered = null, chosen = null;\n",
    "  // What a title says is shown at once, not after the browser's delay.\n",
    "  for (const box of svg.querySelectorAll('rect')) {\n",
    "    const title = box.querySelector('title');\n",
    "    if (!title) continue;\n",
    "    box.dataset.says = title.textContent;\n",
    "    title.remove();\n",
    "  }\n",
    "  const place = event => {\n",
    "    const at = svg.createSVGPoint();\n",
    "    at.x = event.clientX;\n",
    "    at.y = event.clientY;\n",
    "    return at.matrixTransform(svg.getScreenCTM().inverse());\n",
    "  };\n",
    "  const show = (x, y, w, h) => svg.setAttribute('viewBox', [x, y, w, h].join(' '));\n",
    "  svg.addEventListener('mousemove', event => {\n",
    "    const box = event.target.dataset && event.target.dataset.says ? event.target : null;\n",
    "    if (hovered && hovered !== box) hovered.style.stroke = hovered.style.strokeWidth = '';\n",
    "    hovered = box;\n",
    "    if (box && !drawn) {\n",
    "      box.style.stroke = 'var(--ink)';\n",
    "      box.style.strokeWidth = '1.5';\n",
    "      tip.textContent = box.dataset.says;\n",
    "      tip.style.display = 'block';\n",
    "      tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px';\n",
    "      tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + 'px';\n",
    "    } else tip.style.display = 'none';\n",
    "    if (!corner) return;\n",
    "    const at = place(event), w = Math.abs(at.x - corner.x), h = Math.abs(at.y - corner.y);\n",
    "    if (!drawn && w + h > 8) {\n",
    "      drawn = document.createElementNS('http://www.w3.org/2000/svg', 'rect');\n",
    "      drawn.setAttribute('class', 'drawn');\n",
    "      drawn.style.pointerEvents = 'none';\n",
    "      svg.append(drawn);\n",
    "    }\n",
    "    if (drawn)\n",
    "      for (const [name, value] of [['x', Math.min(at.x, corner.x)], ['y', Math.min(at.y, corner.y)], ['width', w], ['height', h]])\n",
    "        drawn.setAttribute(name, value);\n",
    "  });\n",
    "  svg.addEventListener('mouseleave', () => { tip.style.display = 'none'; });\n",
    "  svg.addEventListener('mousedown', event => { corner = place(event); event.preventDefault(); });\n",
    "  addEventListener('mouseup', () => {\n",
    "    if (drawn) {\n",
    "      const [x, y, w, h] = ['x', 'y', 'width', 'height'].map(name => +drawn.getAttribute(name));\n",
    "      drawn.remove();\n",
    "      if (w > 2 && h > 2) {\n",
    "        const grown = Math.max(w, h * whole[2] / whole[3]); // the page's shape stays\n",
    "        show(x + w / 2 - grown / 2, y + h / 2 - grown * whole[3] / whole[2] / 2, grown, grown * whole[3] / whole[2]);\n",
    "      }\n",
    "    }\n",
    "    corner = drawn = null;\n",
    "  });\n",
    "  svg.addEventListener('dblclick', () => show(...whole));\n",
    "  // The rows of the legend are pairs of a square and its name; a click shows the buffers of one category.\n",
    "  for (const square of svg.querySelectorAll('rect[width=\"12\"]')) {\n",
    "    const color = square.getAttribute('fill'), name = square.nextElementSibling;\n",
    "    if (!buffers.some(box => box.getAttribute('fill') === color)) continue;\n",
    "    for (const part of [square, name]) {\n",
    "      part.classList.add('key');\n",
    "      part.addEventListener('click', () => {\n",
    "        chosen = chosen === color ? null : color;\n",
    "        for (const box of buffers) box.classList.toggle('faded', chosen !== null && box.getAttribute('fill') !== chosen);\n",
    "      });\n",
    "    }\n",
    "  }\n",
    "})();\n",
    // clang-format on
};

// Writes the placed plan's page. scripts/report.py takes the part between its two comments. budget: as plan_draw's.
static void plan_write_page(FILE *file, const struct plan *plan, const size_t budget[MEMORY_COUNT]) {
    fputs(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>Memory plan</title>\n"
        "<style>:root{color-scheme:light dark}body{margin:0}@media (prefers-color-scheme:dark){body{background:#1b1f25}}</style>\n<!-- plan -->\n<style>\n",
        file);
    for (size_t i = 0; i < sizeof plan_page_style / sizeof *plan_page_style; i++)
        fputs(plan_page_style[i], file);
    fputs(
        "</style>\n<div class=\"plan\">\n<div class=\"say\">drag to zoom, double-click to see all, click a category</div>"
        "<div class=\"tip\"></div>\n",
        file);
    plan_draw(file, plan, budget);
    fputs("</div>\n<script>\n", file);
    for (size_t i = 0; i < sizeof plan_page_script / sizeof *plan_page_script; i++)
        fputs(plan_page_script[i], file);
    fputs("</script>\n<!-- plan end -->\n</html>\n", file);
}

static bool plan_is_page(const char *path) {
    const size_t length = strlen(path), ending = sizeof ".html" - 1;
    return length >= ending && strcasecmp(path + length - ending, ".html") == 0;
}
// Writes the placed plan to `path`: a page for .html, else SVG. Ends the program if it can't. budget: plan_draw's.
static void plan_write_picture(const struct plan *plan, const size_t budget[MEMORY_COUNT], const char *path) {
    struct report_file out = report_file_open("--plan-picture", path);
    if (plan_is_page(path))
        plan_write_page(out.file, plan, budget);
    else
        plan_draw(out.file, plan, budget);
    report_file_close(&out);
}
