// Times and bytes as texts.
"use strict";

const units = (() => {
  const formatTime = (ns) => {
    const size = Math.abs(ns);
    const [unit, name] = size >= 1e9 ? [1e9, "s"] : size >= 1e6 ? [1e6, "ms"] : size >= 1e3 ? [1e3, "µs"] : [1, "ns"];
    return `${Number((ns / unit).toPrecision(4))} ${name}`;
  };
  const formatBytes = (bytes) => {
    const [unit, name] = bytes >= 2 ** 30 ? [2 ** 30, "GiB"] : bytes >= 2 ** 20 ? [2 ** 20, "MiB"] : bytes >= 2 ** 10 ? [2 ** 10, "KiB"] : [1, "B"];
    return `${Number((bytes / unit).toPrecision(3))} ${name}`;
  };
  return {formatTime, formatBytes};
})();
