locals {
  # What each right is called among Cloudflare's permission groups. Writing includes reading there.
  rights = {
    read  = "Workers R2 Storage Bucket Item Read"
    write = "Workers R2 Storage Bucket Item Write"
  }

  tokens = {
    for pair in setproduct(keys(var.buckets), keys(local.rights)) :
    "${pair[0]}-${pair[1]}" => { role = pair[0], right = pair[1] }
  }

  seconds_a_day = 86400
}

data "cloudflare_account_api_token_permission_groups_list" "all" {
  account_id = var.account_id

  lifecycle {
    postcondition {
      condition     = length(setsubtract(values(local.rights), self.result[*].name)) == 0
      error_message = "Cloudflare does not list the permission groups for R2: may CLOUDFLARE_API_TOKEN read the account's tokens?"
    }
  }
}

resource "cloudflare_r2_bucket" "role" {
  for_each = var.buckets

  account_id   = var.account_id
  name         = each.value
  jurisdiction = var.jurisdiction
  location     = var.location

  lifecycle {
    prevent_destroy = true # a bucket goes by hand, when what is in it has gone
  }
}

# The rules of a bucket are one list: what stands here replaces the rule that R2 gives a new bucket.
resource "cloudflare_r2_bucket_lifecycle" "role" {
  for_each = cloudflare_r2_bucket.role

  account_id   = var.account_id
  bucket_name  = each.value.name
  jurisdiction = var.jurisdiction

  rules = [{
    id         = "Abort unfinished uploads"
    enabled    = true
    conditions = { prefix = "" }
    abort_multipart_uploads_transition = {
      condition = {
        type    = "Age"
        max_age = var.abort_uploads_after_days * local.seconds_a_day
      }
    }
  }]
}

# A token for each bucket and right. One policy with one permission group: the provider has had
# trouble with the order of several.
resource "cloudflare_account_token" "bucket" {
  for_each = local.tokens

  account_id = var.account_id
  name       = "millrace ${each.key}"

  policies = [{
    effect = "allow"
    permission_groups = [{
      id = one([
        for group in data.cloudflare_account_api_token_permission_groups_list.all.result :
        group.id if group.name == local.rights[each.value.right]
      ])
    }]
    resources = jsonencode({
      "com.cloudflare.edge.r2.bucket.${var.account_id}_${var.jurisdiction}_${cloudflare_r2_bucket.role[each.value.role].name}" = "*"
    })
  }]
}
