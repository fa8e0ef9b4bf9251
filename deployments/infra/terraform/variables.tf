variable "account_id" {
  description = "The Cloudflare account that the buckets are in: 32 hexadecimal digits."
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{32}$", var.account_id))
    error_message = "An account has 32 hexadecimal digits. A jurisdiction is a variable of its own."
  }
}

variable "buckets" {
  description = "The name of the bucket of each role."
  type = object({
    gradients  = optional(string, "gradients")
    dataset    = optional(string, "dataset")
    aggregator = optional(string, "aggregator")
  })
  default = {}

  validation {
    condition = alltrue([
      for name in values(var.buckets) : can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", name))
    ])
    error_message = "R2 takes 3 to 63 small letters, digits and hyphens, and no hyphen at an end."
  }

  validation {
    condition     = length(distinct(values(var.buckets))) == length(values(var.buckets))
    error_message = "Each role has a bucket of its own: who may write one may not write another."
  }
}

variable "jurisdiction" {
  description = "Where objects are guaranteed to stay: default (anywhere), eu or fedramp."
  type        = string
  default     = "default"

  validation {
    condition     = contains(["default", "eu", "fedramp"], var.jurisdiction)
    error_message = "Millrace knows the jurisdictions default, eu and fedramp."
  }
}

variable "location" {
  description = "A hint where the buckets are best: apac, eeur, enam, oc, weur or wnam. R2 heeds it when a bucket is made, and chooses by itself without one."
  type        = string
  default     = null

  validation {
    condition = (
      var.location == null ||
      contains(["apac", "eeur", "enam", "oc", "weur", "wnam"], coalesce(var.location, "apac"))
    )
    error_message = "One of apac, eeur, enam, oc, weur and wnam, or null."
  }
}

variable "abort_uploads_after_days" {
  description = "After how many days an upload that was begun and never finished is aborted, and no longer paid for."
  type        = number
  default     = 7

  validation {
    condition = (
      var.abort_uploads_after_days >= 1 &&
      var.abort_uploads_after_days == floor(var.abort_uploads_after_days)
    )
    error_message = "Whole days, and one at least: an upload of a large file may take hours."
  }
}
