// Times and bytes as texts.
"use strict";

const units = (() => {
  const formatTime = (ns) => {
    const size = Math.abs(ns);
    const [unit, name] = size >= 1e9 ? [1e9, "s"] : size >= 1e6 ? [1e6, "ms"] : size >= 1e3 ? [1e3, "µs"] : [1, "ns"];
    return `${Number((ns / unit).toPrecision(4))} ${name}`;
  };
  // As the program writes bytes and seconds: three digits, halves to the even one as in C, no zeros behind them, in the largest unit of
  // which there is one.
  const scaled = (size, list) => {
    const [unit, name] = list.find(([factor]) => size >= 0.9995 * factor) ?? list[list.length - 1];
    const value = size / unit, power = value < 9.995 ? 100 : value < 99.95 ? 10 : 1;
    const whole = value * power;
    return `${(whole % 1 === 0.5 ? 2 * Math.round(whole / 2) : Math.round(whole)) / power} ${name}`;
  };
  const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
  const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"], [1e-12, "ps"]];
  const formatBytes = (bytes) => scaled(bytes, BYTES);
  const formatSeconds = (seconds) => seconds === 0 ? "0 s" : seconds >= 7200 ? scaled(seconds / 3600, [[1, "h"]]) :
    seconds >= 120 ? scaled(seconds / 60, [[1, "min"]]) : scaled(seconds, SECONDS);
  const formatPercent = (share) => `${Number((100 * share).toFixed(1))} %`;
  return {formatTime, formatBytes, formatSeconds, formatPercent};
})();
