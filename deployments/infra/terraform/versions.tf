terraform {
  required_version = ">= 1.6, < 2"

  required_providers {
    cloudflare = {
      source  = "cloudflare/cloudflare"
      version = "~> 5.24" # before 5.13 a policy's resources are written differently; 5.19 spoils tokens
    }
  }

  # The state holds every secret key. A backend that encrypts it belongs here, such as a private
  # bucket of its own: see the README beside the folder.
}

# Reads CLOUDFLARE_API_TOKEN: a token of the account that may edit R2 storage and account tokens.
provider "cloudflare" {}
