# The tables of all commands and the synonyms of flags, for the program and the page in a browser.
function(sw_embed_commands target)
  sw_embed(${target} synonyms FOLDER cli FILES synonyms.json)
  sw_embed(${target} command_tables FOLDER cli
    FILES
      commands/advise.json
      commands/baselines.json
      commands/calibrate.json
      commands/check.json
      commands/checkpoint.json
      commands/compare.json
      commands/diff.json
      commands/doctor.json
      commands/emit.json
      commands/estimate.json
      commands/eval.json
      commands/export.json
      commands/goodput.json
      commands/hang.json
      commands/import-run.json
      commands/inspect-trace.json
      commands/inspect.json
      commands/judge.json
      commands/list.json
      commands/page.json
      commands/plan.json
      commands/price.json
      commands/report.json
      commands/run.json
      commands/shared.json
      commands/simulate.json
      commands/sweep.json
      commands/topo.json
      commands/validate.json
  )
endfunction()
