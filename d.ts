import type { Dashboard } from "@grafana/schema";
type Json<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T : T extends (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
export const dashboard: Json<Dashboard> = {
 "title": "vpmm",
 "uid": "vpmm",
 "description": "Pools of vpmm: what they hold, how mallocs are served, and what goes wrong",
 "tags": [
  "vpmm",
  "gpu",
  "memory"
 ],
 "schemaVersion": 39,
 "version": 1,
 "editable": true,
 "graphTooltip": 1,
 "refresh": "10s",
 "time": {
  "from": "now-30m",
  "to": "now"
 },
 "timezone": "browser",
 "fiscalYearStartMonth": 0,
 "liveNow": false,
 "weekStart": "",
 "timepicker": {},
 "links": [],
 "annotations": {
  "list": []
 },
 "templating": {
  "list": [
   {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "multi": false,
    "includeAll": false,
    "hide": 0,
    "skipUrlSync": false,
    "options": [],
    "regex": "",
    "current": {
     "selected": false,
     "text": "Prometheus",
     "value": "prometheus"
    }
   },
   {
    "name": "job",
    "label": "Job",
    "type": "query",
    "datasource": {
     "type": "prometheus",
     "uid": "${datasource}"
    },
    "query": {
     "query": "label_values(vpmm_mapped_bytes, job)",
     "refId": "Prometheus-job"
    },
    "refresh": 2,
    "sort": 1,
    "multi": true,
    "includeAll": true,
    "allValue": ".+",
    "hide": 0,
    "skipUrlSync": false,
    "options": [],
    "regex": "",
    "current": {
     "selected": true,
     "text": [
      "All"
     ],
     "value": [
      "$__all"
     ]
    }
   },
   {
    "name": "instance",
    "label": "Instance",
    "type": "query",
    "datasource": {
     "type": "prometheus",
     "uid": "${datasource}"
    },
    "query": {
     "query": "label_values(vpmm_mapped_bytes{job=~\"$job\"}, instance)",
     "refId": "Prometheus-instance"
    },
    "refresh": 2,
    "sort": 1,
    "multi": true,
    "includeAll": true,
    "allValue": ".+",
    "hide": 0,
    "skipUrlSync": false,
    "options": [],
    "regex": "",
    "current": {
     "selected": true,
     "text": [
      "All"
     ],
     "value": [
      "$__all"
     ]
    }
   },
   {
    "name": "device",
    "label": "Device",
    "type": "query",
    "datasource": {
     "type": "prometheus",
     "uid": "${datasource}"
    },
    "query": {
     "query": "label_values(vpmm_mapped_bytes{job=~\"$job\",instance=~\"$instance\"}, device)",
     "refId": "Prometheus-device"
    },
    "refresh": 2,
    "sort": 1,
    "multi": true,
    "includeAll": true,
    "allValue": ".+",
    "hide": 0,
    "skipUrlSync": false,
    "options": [],
    "regex": "",
    "current": {
     "selected": true,
     "text": [
      "All"
     ],
     "value": [
      "$__all"
     ]
    }
   },
   {
    "name": "pool",
    "label": "Pool",
    "type": "query",
    "datasource": {
     "type": "prometheus",
     "uid": "${datasource}"
    },
    "query": {
     "query": "label_values(vpmm_mapped_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\"}, pool)",
     "refId": "Prometheus-pool"
    },
    "refresh": 2,
    "sort": 1,
    "multi": true,
    "includeAll": true,
    "allValue": ".+",
    "hide": 0,
    "skipUrlSync": false,
    "options": [],
    "regex": "",
    "current": {
     "selected": true,
     "text": [
      "All"
     ],
     "value": [
      "$__all"
     ]
    }
   }
  ]
 },
 "panels": [
  {
   "id": 1,
   "type": "row",
   "title": "Now",
   "collapsed": false,
   "gridPos": {
    "x": 0,
    "y": 0,
    "w": 24,
    "h": 1
   },
   "panels": []
  },
  {
   "id": 2,
   "type": "stat",
   "title": "Up",
   "description": "Targets of the job that answer",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 1,
    "w": 3,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(up{job=~\"$job\",instance=~\"$instance\"})",
     "legendFormat": "up"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "none",
     "thresholds": {
      "mode": "absolute",
      "steps": [
       {
        "color": "red",
        "value": null
       },
       {
        "color": "green",
        "value": 1
       }
      ]
     },
     "color": {
      "mode": "thresholds"
     }
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 3,
   "type": "stat",
   "title": "In use",
   "description": "Pages handed out",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 3,
    "y": 1,
    "w": 4,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_live_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "live"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes"
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 4,
   "type": "stat",
   "title": "Held",
   "description": "Physical memory of the pools",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 7,
    "y": 1,
    "w": 4,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_mapped_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "mapped"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes"
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 5,
   "type": "stat",
   "title": "Occupancy",
   "description": "In use, of what is held",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 11,
    "y": 1,
    "w": 4,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_live_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}) / sum(vpmm_mapped_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "occupancy"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "percentunit",
     "thresholds": {
      "mode": "absolute",
      "steps": [
       {
        "color": "red",
        "value": null
       },
       {
        "color": "yellow",
        "value": 0.25
       },
       {
        "color": "green",
        "value": 0.5
       }
      ]
     },
     "color": {
      "mode": "thresholds"
     },
     "min": 0,
     "max": 1
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 6,
   "type": "stat",
   "title": "Failures",
   "description": "Mallocs and frees that answered an error, in the time shown",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 15,
    "y": 1,
    "w": 3,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(increase(vpmm_failures_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__range]))",
     "legendFormat": "failures"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "short",
     "thresholds": {
      "mode": "absolute",
      "steps": [
       {
        "color": "green",
        "value": null
       },
       {
        "color": "red",
        "value": 1
       }
      ]
     },
     "color": {
      "mode": "thresholds"
     }
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 7,
   "type": "stat",
   "title": "Reaper",
   "description": "The oldest age: 0 while it sleeps with nothing to do",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 18,
    "y": 1,
    "w": 3,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "max(vpmm_reaper_age_seconds{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "age"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "s",
     "thresholds": {
      "mode": "absolute",
      "steps": [
       {
        "color": "green",
        "value": null
       },
       {
        "color": "yellow",
        "value": 1
       },
       {
        "color": "red",
        "value": 10
       }
      ]
     },
     "color": {
      "mode": "thresholds"
     }
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 8,
   "type": "stat",
   "title": "Driver lost",
   "description": "Pools whose driver has failed for good",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 21,
    "y": 1,
    "w": 3,
    "h": 4
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_driver_lost{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "lost"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "short",
     "thresholds": {
      "mode": "absolute",
      "steps": [
       {
        "color": "green",
        "value": null
       },
       {
        "color": "red",
        "value": 1
       }
      ]
     },
     "color": {
      "mode": "thresholds"
     }
    },
    "overrides": []
   },
   "options": {
    "reduceOptions": {
     "calcs": [
      "lastNotNull"
     ],
     "fields": "",
     "values": false
    },
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto"
   }
  },
  {
   "id": 9,
   "type": "row",
   "title": "Memory",
   "collapsed": false,
   "gridPos": {
    "x": 0,
    "y": 5,
    "w": 24,
    "h": 1
   },
   "panels": []
  },
  {
   "id": 10,
   "type": "timeseries",
   "title": "Composition",
   "description": "What is held: live, cached and reusable (which sum to mapped); pending unmap is address space alone. Lines: the peak, and the device",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 6,
    "w": 12,
    "h": 9
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_live_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "live"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_reusable_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}) - sum(vpmm_cached_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "reusable"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_cached_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "cached"
    },
    {
     "refId": "D",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_async_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "small requests (driver's pool)"
    },
    {
     "refId": "E",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_peak_mapped_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "peak mapped"
    },
    {
     "refId": "F",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_pending_unmap_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "pending unmap"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 60,
      "showPoints": "never",
      "spanNulls": false,
      "stacking": {
       "mode": "normal",
       "group": "A"
      }
     }
    },
    "overrides": [
     {
      "matcher": {
       "id": "byRegexp",
       "options": "peak mapped|pending unmap"
      },
      "properties": [
       {
        "id": "custom.stacking",
        "value": {
         "mode": "none",
         "group": "A"
        }
       },
       {
        "id": "custom.fillOpacity",
        "value": 0
       }
      ]
     }
    ]
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 11,
   "type": "timeseries",
   "title": "Occupancy",
   "description": "Live of mapped, by pool; and what the program asked for of what it was given (rounding to pages)",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 12,
    "y": 6,
    "w": 6,
    "h": 9
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_live_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} / (vpmm_mapped_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} > 0)",
     "legendFormat": "{{pool}} live / mapped"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_requested_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} / (vpmm_live_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} > 0)",
     "legendFormat": "{{pool}} requested / live"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "percentunit",
     "min": 0,
     "max": 1,
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 12,
   "type": "timeseries",
   "title": "Fragmentation",
   "description": "How much of the reusable memory is not in the longest free region: 0, it is one piece. It costs a build, not an allocation",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 18,
    "y": 6,
    "w": 6,
    "h": 9
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "1 - vpmm_largest_free_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} / (vpmm_reusable_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} > 0)",
     "legendFormat": "{{pool}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "percentunit",
     "min": 0,
     "max": 1,
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 13,
   "type": "timeseries",
   "title": "Largest pieces",
   "description": "The longest free region, and the longest hole of address space",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 15,
    "w": 12,
    "h": 7
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_largest_free_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}",
     "legendFormat": "{{pool}} free"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_largest_hole_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}",
     "legendFormat": "{{pool}} hole"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false,
      "scaleDistribution": {
       "type": "log",
       "log": 2
      }
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 14,
   "type": "timeseries",
   "title": "Address space",
   "description": "Every reserved byte is live, reusable, a hole, or pending unmap",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 12,
    "y": 15,
    "w": 12,
    "h": 7
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_reserved_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "reserved"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_hole_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "holes"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_peak_live_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "peak live"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false,
      "scaleDistribution": {
       "type": "log",
       "log": 2
      }
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 15,
   "type": "row",
   "title": "Mallocs and frees",
   "collapsed": false,
   "gridPos": {
    "x": 0,
    "y": 22,
    "w": 24,
    "h": 1
   },
   "panels": []
  },
  {
   "id": 16,
   "type": "timeseries",
   "title": "Mallocs by the tier that served them",
   "description": "cache, own_stream, neighbour and completed need no driver call; waited and build do; small is the driver's pool",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 23,
    "w": 12,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum by (tier) (rate(vpmm_mallocs_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "{{tier}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 40,
      "showPoints": "never",
      "spanNulls": false,
      "stacking": {
       "mode": "normal",
       "group": "A"
      }
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 17,
   "type": "timeseries",
   "title": "Share of mallocs of pages that need no build",
   "description": "Of mallocs of at least a page",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 12,
    "y": 23,
    "w": 6,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "1 - sum by (pool) (rate(vpmm_builds_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval])) / (sum by (pool) (rate(vpmm_mallocs_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\",tier!=\"small\"}[$__rate_interval])) > 0)",
     "legendFormat": "{{pool}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "percentunit",
     "max": 1,
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 18,
   "type": "timeseries",
   "title": "Frees",
   "description": "By where they went",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 18,
    "y": 23,
    "w": 6,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum by (tier) (rate(vpmm_frees_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "{{tier}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 40,
      "showPoints": "never",
      "spanNulls": false,
      "stacking": {
       "mode": "normal",
       "group": "A"
      }
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 19,
   "type": "heatmap",
   "title": "Latency of mallocs that asked the driver",
   "description": "Mallocs that found free memory at once are not timed",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 31,
    "w": 12,
    "h": 9
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum by (le) (increase(vpmm_malloc_duration_seconds_bucket{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "{{le}}",
     "format": "heatmap"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "s",
     "custom": {
      "hideFrom": {
       "legend": false,
       "tooltip": false,
       "viz": false
      },
      "scaleDistribution": {
       "type": "linear"
      }
     }
    },
    "overrides": []
   },
   "options": {
    "calculate": false,
    "cellGap": 1,
    "color": {
     "mode": "scheme",
     "scheme": "Oranges",
     "exponent": 0.5,
     "fill": "dark-orange",
     "reverse": false,
     "steps": 64
    },
    "filterValues": {
     "le": 1e-09
    },
    "legend": {
     "show": true
    },
    "rowsFrame": {
     "layout": "auto"
    },
    "showValue": "never",
    "tooltip": {
     "mode": "single",
     "yHistogram": false
    },
    "yAxis": {
     "axisPlacement": "left",
     "reverse": false,
     "unit": "s"
    },
    "exemplars": {
     "color": "rgba(255,0,255,0.7)"
    }
   }
  },
  {
   "id": 20,
   "type": "timeseries",
   "title": "The same, 50 %, 99 % and mean",
   "description": "Of mallocs that asked the driver",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 12,
    "y": 31,
    "w": 12,
    "h": 9
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "histogram_quantile(0.5, sum by (le) (rate(vpmm_malloc_duration_seconds_bucket{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval])))",
     "legendFormat": "50 %"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "histogram_quantile(0.99, sum by (le) (rate(vpmm_malloc_duration_seconds_bucket{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval])))",
     "legendFormat": "99 %"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_malloc_duration_seconds_sum{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval])) / sum(rate(vpmm_malloc_duration_seconds_count{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "mean"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "s",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 21,
   "type": "row",
   "title": "Failures, the driver and the reaper",
   "collapsed": false,
   "gridPos": {
    "x": 0,
    "y": 40,
    "w": 24,
    "h": 1
   },
   "panels": []
  },
  {
   "id": 22,
   "type": "timeseries",
   "title": "Failures",
   "description": "Mallocs and frees that answered an error, by status; and requests for which everything was taken back first",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 41,
    "w": 8,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum by (status) (rate(vpmm_failures_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "{{status}}"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_reclaims_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "reclaims"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_out_of_memory_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "out of memory, in all"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 23,
   "type": "timeseries",
   "title": "Driver calls",
   "description": "The ten most frequent",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 8,
    "y": 41,
    "w": 8,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "topk(10, sum by (call) (rate(vpmm_driver_calls_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval])))",
     "legendFormat": "{{call}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 24,
   "type": "timeseries",
   "title": "Driver errors",
   "description": "Calls that failed",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 16,
    "y": 41,
    "w": 8,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum by (call) (rate(vpmm_driver_errors_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval])) > 0 or sum(rate(vpmm_driver_errors_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "{{call}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 25,
   "type": "timeseries",
   "title": "Reaper",
   "description": "Its age; more than 10 s is a stall",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 49,
    "w": 8,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_reaper_age_seconds{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}",
     "legendFormat": "{{pool}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "s",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 26,
   "type": "timeseries",
   "title": "Old addresses",
   "description": "Waiting to be unmapped, and unmapped",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 8,
    "y": 49,
    "w": 8,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(vpmm_pending_unmap_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"})",
     "legendFormat": "pending"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_zombies_retired_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "unmapped / s"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_unmap_failures_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "refused / s"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "short",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": [
     {
      "matcher": {
       "id": "byName",
       "options": "pending"
      },
      "properties": [
       {
        "id": "unit",
        "value": "bytes"
       }
      ]
     },
     {
      "matcher": {
       "id": "byRegexp",
       "options": ".*/ s"
      },
      "properties": [
       {
        "id": "custom.axisPlacement",
        "value": "right"
       }
      ]
     }
    ]
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 27,
   "type": "timeseries",
   "title": "Extents and fences",
   "description": "Handles created, moved and given back; fences recorded",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 16,
    "y": 49,
    "w": 8,
    "h": 8
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_extents_created_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "created"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_extents_remapped_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "moved"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_extents_released_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "given back"
    },
    {
     "refId": "D",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_marks_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "fences"
    },
    {
     "refId": "E",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "sum(rate(vpmm_pages_created_total{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}[$__rate_interval]))",
     "legendFormat": "pages created"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 28,
   "type": "row",
   "title": "The process and the exporter",
   "collapsed": false,
   "gridPos": {
    "x": 0,
    "y": 57,
    "w": 24,
    "h": 1
   },
   "panels": []
  },
  {
   "id": 29,
   "type": "timeseries",
   "title": "Processor",
   "description": "Of the process, and of its exporter's thread",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 58,
    "w": 8,
    "h": 7
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "rate(process_cpu_seconds_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval])",
     "legendFormat": "{{instance}}"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "rate(vpmm_exporter_cpu_seconds_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval])",
     "legendFormat": "{{instance}} exporter"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "percentunit",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 30,
   "type": "timeseries",
   "title": "Host memory and descriptors",
   "description": "",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 8,
    "y": 58,
    "w": 8,
    "h": 7
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "process_resident_memory_bytes{job=~\"$job\",instance=~\"$instance\"}",
     "legendFormat": "{{instance}} resident"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "process_virtual_memory_bytes{job=~\"$job\",instance=~\"$instance\"}",
     "legendFormat": "{{instance}} virtual"
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "process_open_fds{job=~\"$job\",instance=~\"$instance\"} / process_max_fds{job=~\"$job\",instance=~\"$instance\"}",
     "legendFormat": "{{instance}} descriptors"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false,
      "scaleDistribution": {
       "type": "log",
       "log": 10
      }
     }
    },
    "overrides": [
     {
      "matcher": {
       "id": "byRegexp",
       "options": ".* descriptors"
      },
      "properties": [
       {
        "id": "unit",
        "value": "percentunit"
       },
       {
        "id": "custom.axisPlacement",
        "value": "right"
       },
       {
        "id": "custom.scaleDistribution",
        "value": {
         "type": "linear"
        }
       }
      ]
     }
    ]
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 31,
   "type": "timeseries",
   "title": "Scrapes and refusals",
   "description": "What the exporter served, and what it refused, by reason",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 16,
    "y": 58,
    "w": 8,
    "h": 7
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "rate(vpmm_exporter_scrapes_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval])",
     "legendFormat": "scrapes"
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "rate(vpmm_exporter_refusals_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval])",
     "legendFormat": "{{reason}}"
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "ops",
     "custom": {
      "drawStyle": "line",
      "lineWidth": 1,
      "fillOpacity": 0,
      "showPoints": "never",
      "spanNulls": false
     }
    },
    "overrides": []
   },
   "options": {
    "legend": {
     "displayMode": "list",
     "placement": "bottom",
     "showLegend": true,
     "calcs": []
    },
    "tooltip": {
     "mode": "multi",
     "sort": "desc"
    }
   }
  },
  {
   "id": 32,
   "type": "table",
   "title": "Pools",
   "description": "Each pool's device, its memory, the pool's page and cap (0: none)",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 0,
    "y": 65,
    "w": 16,
    "h": 6
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_device_memory_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"} * on (job, instance, device) group_left (name, uuid) vpmm_device_info{job=~\"$job\",instance=~\"$instance\"}",
     "legendFormat": "",
     "format": "table",
     "instant": true
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_page_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}",
     "legendFormat": "",
     "format": "table",
     "instant": true
    },
    {
     "refId": "C",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_max_mapped_bytes{job=~\"$job\",instance=~\"$instance\",device=~\"$device\",pool=~\"$pool\"}",
     "legendFormat": "",
     "format": "table",
     "instant": true
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "bytes",
     "custom": {
      "align": "auto",
      "cellOptions": {
       "type": "auto"
      },
      "inspect": false
     }
    },
    "overrides": []
   },
   "options": {
    "cellHeight": "sm",
    "showHeader": true,
    "footer": {
     "show": false,
     "reducer": [
      "sum"
     ],
     "countRows": false,
     "fields": ""
    }
   },
   "transformations": [
    {
     "id": "merge",
     "options": {}
    },
    {
     "id": "organize",
     "options": {
      "excludeByName": {
       "Time": true
      },
      "renameByName": {
       "Value #A": "device memory",
       "Value #B": "page",
       "Value #C": "cap"
      }
     }
    }
   ]
  },
  {
   "id": 33,
   "type": "table",
   "title": "Builds",
   "description": "Versions that run, and since when",
   "datasource": {
    "type": "prometheus",
    "uid": "${datasource}"
   },
   "gridPos": {
    "x": 16,
    "y": 65,
    "w": 8,
    "h": 6
   },
   "targets": [
    {
     "refId": "A",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "vpmm_build_info{job=~\"$job\",instance=~\"$instance\"}",
     "legendFormat": "",
     "format": "table",
     "instant": true
    },
    {
     "refId": "B",
     "datasource": {
      "type": "prometheus",
      "uid": "${datasource}"
     },
     "expr": "process_start_time_seconds{job=~\"$job\",instance=~\"$instance\"} * 1000",
     "legendFormat": "",
     "format": "table",
     "instant": true
    }
   ],
   "fieldConfig": {
    "defaults": {
     "unit": "none",
     "custom": {
      "align": "auto",
      "cellOptions": {
       "type": "auto"
      },
      "inspect": false
     }
    },
    "overrides": [
     {
      "matcher": {
       "id": "byName",
       "options": "since"
      },
      "properties": [
       {
        "id": "unit",
        "value": "dateTimeAsIso"
       }
      ]
     }
    ]
   },
   "options": {
    "cellHeight": "sm",
    "showHeader": true,
    "footer": {
     "show": false,
     "reducer": [
      "sum"
     ],
     "countRows": false,
     "fields": ""
    }
   },
   "transformations": [
    {
     "id": "merge",
     "options": {}
    },
    {
     "id": "organize",
     "options": {
      "excludeByName": {
       "Time": true,
       "Value #A": true,
       "__name__": true
      },
      "renameByName": {
       "Value #B": "since"
      }
     }
    }
   ]
  }
 ]
}
